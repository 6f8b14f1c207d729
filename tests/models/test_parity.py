"""A split model computes the same logits and losses as transformers with the same weights, also with padding."""

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from deepspeed_compress.model_families import FAMILIES, modules_of
from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config, whole_logits
from deepspeed_compress.models.pipeline import next_token_loss, pipeline_layers
from tests.models.families import MODELS, padded, random_tokens, save_model
from tests.models.runs import SEED, Run, finish, start
from tests.support.forks import run_forks

SAMPLED = pytest.mark.sampled(4)

ROWS = 3
SIDES = ("none", "left", "right")

Output = tuple[float, NDArray[np.float32]]
"""Loss, and logits (ROWS, LENGTH, vocabulary)."""


def inputs_for(side: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return tokens, the mask of those that are not padding, and labels, which are -100 for padding."""
    tokens = random_tokens(ROWS)
    if side == "none":
        return tokens, None, tokens
    mask = padded(side, ROWS)
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


def output_of(model: Any, side: str) -> Output:
    tokens, mask, labels = inputs_for(side)
    with torch.no_grad():
        output = model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False)
    return float(output.loss), output.logits.numpy()


def output_of_tensor_parallel(model: Any, side: str) -> Output:
    with whole_logits(model), torch.no_grad():
        tokens, mask, _ = inputs_for(side)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return output_of(model, side)[0], logits.numpy()


def in_slices(rank: int, *paths: Path) -> list[dict[str, Output | None]]:
    deepspeed.init_distributed("gloo")
    models = [build_parallel(path, read_model_config(path), SEED, Layout(tensor=2)).eval() for path in paths]
    return [{side: output_of_tensor_parallel(model, side) for side in SIDES} for model in models]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Directories by family, and by whether the head and the embedding are tied."""
    root = tmp_path_factory.mktemp("saved")
    return {(family, tied): save_model(root / f"{family}-{tied}", family, tied) for family in MODELS for tied in TIED}


TIED = (True, False)
Saved = dict[tuple[str, bool], Path]


def check(output: Output | None, model: Any, side: str, tolerance: float) -> None:
    loss, logits = output_of(model, side)
    assert output is not None
    real = np.ones((ROWS, logits.shape[1]), bool) if side == "none" else padded(side, ROWS).numpy().astype(bool)
    # The logits of padding tokens do not matter.
    assert np.abs(output[1] - logits)[real].max() <= tolerance, side
    assert abs(output[0] - loss) <= tolerance, side


def test_every_family_has_a_toy_model() -> None:
    assert set(MODELS) == {name for name, family in FAMILIES.items() if family.modules is not None}


@SAMPLED
@pytest.mark.parametrize("family", MODELS)
def test_two_tensor_parallel_ranks_compute_the_same_logits(family: str, saved: Saved) -> None:
    """Logits are about 1 to 10, and sums of two halves differ by a few units in the last place."""
    paths = [saved[family, tied] for tied in TIED]
    for rank in run_forks(2, in_slices, *paths):
        for path, seen in zip(paths, rank, strict=True):
            model = AutoModelForCausalLM.from_pretrained(path)
            for side in SIDES:
                check(seen[side], model, side, tolerance=1e-5)


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", MODELS)
def test_pipeline_layers_in_one_process_compute_the_same_bits(family: str, tied: bool, saved: Saved) -> None:
    path = saved[family, tied]
    model: Any = build_model(path, read_model_config(path), SEED).eval()
    for side in SIDES:
        tokens, mask, labels = inputs_for(side)
        hidden: Any = tokens if mask is None else (tokens, mask)
        with torch.no_grad():
            for layer in pipeline_layers(model, modules_of(model.config)):
                hidden = apply(layer, hidden)
            loss = next_token_loss(hidden, labels)
        check((float(loss), hidden.numpy()), model, side, tolerance=0.0)


def apply(layer: Any, hidden: Any) -> Any:
    if not isinstance(layer, TiedLayerSpec):
        return layer(hidden)
    module = layer.build()
    return module(hidden) if layer.forward_fn is None else layer.forward_fn(module, hidden)


def output_of_pipeline(engine: Any, side: str) -> Output | None:
    """Return the output of a pipeline; None on ranks that do not compute logits."""
    tokens, mask, labels = inputs_for(side)
    inputs = tokens if mask is None else (tokens, mask)
    engine.reset_activation_shape()
    loss, logits = engine.eval_batch(iter([(inputs, labels)]), return_logits=True)
    return None if logits is None else (float(loss), logits.numpy())


def in_stages(rank: int, *paths: Path) -> list[dict[str, Output | None]]:
    seen = []
    for path in paths:
        engine = start(Run(path, Layout(pipeline=2)))
        seen.append({side: output_of_pipeline(engine, side) for side in SIDES})
        finish(engine)
    return seen


@SAMPLED
@pytest.mark.parametrize("family", MODELS)
def test_two_pipeline_stages_compute_the_same_bits(family: str, saved: Saved) -> None:
    paths = [saved[family, tied] for tied in TIED]
    _, last = run_forks(2, in_stages, *paths)
    for path, seen in zip(paths, last, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path)
        for side in SIDES:
            check(seen[side], model, side, tolerance=0.0)
