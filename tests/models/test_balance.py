"""Partitioning of layers into pipeline stages."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from deepspeed.pipe import TiedLayerSpec
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import modules_of
from deepspeed_compress.models.pipeline import LOOKUP, DecoderLayer, partition_by, pipeline_layers
from deepspeed_compress.models.sources import build_skeleton
from tests.support.properties import properties

WIDTH = 16
SMALL, LARGE = 100, 20_000
"""Vocabulary sizes: the head is lighter than a decoder layer of this width, or as heavy as a hundred of them."""


def gpt2(layers: int, vocabulary: int = LARGE, tied: bool = True) -> list[Any]:
    sizes = {"n_embd": WIDTH, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=layers, vocab_size=vocabulary, tie_word_embeddings=tied, **sizes)
    model = build_skeleton(config)
    return pipeline_layers(model, modules_of(model.config))


def decoders(layers: Sequence[Any], bounds: Sequence[int]) -> list[int]:
    """Return the number of decoder layers of each stage."""
    return [sum(isinstance(layer, DecoderLayer) for layer in layers[i:j]) for i, j in pairwise(bounds)]


def parameters(layer: Any) -> int:
    module = layer.module_args[0] if isinstance(layer, TiedLayerSpec) else layer
    return sum(parameter.numel() for parameter in module.parameters())


def work(layers: Sequence[Any]) -> list[float]:
    """Return the costs that "balanced" balances: the size of each layer, or a tenth of it for embeddings."""
    first = next(index for index, layer in enumerate(layers) if isinstance(layer, DecoderLayer))
    return [parameters(layer) * (LOOKUP if index < first else 1.0) for index, layer in enumerate(layers)]


def heaviest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sum(costs[i:j]) for i, j in pairwise(bounds))


@pytest.mark.parametrize("tied", [True, False])
def test_a_heavy_head_leaves_its_stage_fewer_layers(tied: bool) -> None:
    layers = gpt2(8, vocabulary=1000, tied=tied)
    first, last = decoders(layers, partition_by("balanced")(layers, 2))
    assert first > last
    assert decoders(layers, partition_by("uniform")(layers, 2)) == [4, 4]
    layers = gpt2(8, tied=tied)
    assert decoders(layers, partition_by("balanced")(layers, 2)) == [8, 0]


def test_a_light_head_leaves_stages_equal() -> None:
    layers = gpt2(8, SMALL)
    assert decoders(layers, partition_by("balanced")(layers, 2)) == [4, 4]


def test_partition_by_parameters_counts_the_embedding_as_much_as_the_head() -> None:
    layers = gpt2(8, vocabulary=2000)
    assert decoders(layers, partition_by("parameters")(layers, 3)) == [0, 8, 0]
    assert decoders(layers, partition_by("balanced")(layers, 3)) == [4, 4, 0]


models = st.builds(gpt2, st.integers(2, 9), st.integers(1, LARGE), st.booleans())


@properties
@given(st.data(), models, st.sampled_from(["balanced", "parameters", "uniform"]))
def test_every_layer_is_in_one_stage(data: st.DataObject, layers: list[Any], method: str) -> None:
    stages = data.draw(st.integers(2, sum(isinstance(layer, DecoderLayer) for layer in layers)))
    bounds = partition_by(method)(layers, stages)
    assert len(bounds) == stages + 1
    assert [index for i, j in pairwise(bounds) for index in range(i, j)] == list(range(len(layers)))
    assert all(sum(map(parameters, layers[i:j])) > 0 for i, j in pairwise(bounds)), "a stage has nothing to train"


@properties
@given(st.data(), models)
def test_balanced_minimizes_the_heaviest_stage(data: st.DataObject, layers: list[Any]) -> None:
    stages = data.draw(st.integers(2, min(4, sum(isinstance(layer, DecoderLayer) for layer in layers))))
    costs, last = work(layers), len(layers)
    cuts = ((0, *inner, last) for inner in combinations(range(1, last), stages - 1))
    best = min(heaviest(costs, cut) for cut in cuts)
    assert heaviest(costs, partition_by("balanced")(layers, stages)) == pytest.approx(best, rel=1e-3)


@properties
@given(st.lists(st.integers(1, 3), max_size=2), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_explicit_counts_are_used(inner: list[int], first: int, last: int, tied: bool) -> None:
    counts = (first, *inner, last)
    if sum(counts) == 0:
        return
    layers = gpt2(sum(counts), SMALL, tied)
    bounds = partition_by(counts)(layers, len(counts))
    assert (bounds[0], bounds[-1]) == (0, len(layers))
    assert decoders(layers, bounds) == list(counts)


@pytest.mark.parametrize("counts", [(4,), (2, 1, 1), (2, 3), (2, 1), (0, 0)])
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r'partition: \[.*\] \(allowed: 2 numbers.* of 4 decoder .* or "balanced"'):
        partition_by(counts)(gpt2(4, SMALL), 2)


def test_an_inner_stage_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="only the first and the last stage may have 0"):
        partition_by((2, 0, 2))(gpt2(4, SMALL), 3)
