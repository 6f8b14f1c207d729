"""Pipeline stages of the planner are those of `build_parallel`."""

import itertools
from dataclasses import replace

import pytest
from deepspeed.runtime.utils import partition_balanced

from deepspeed_compress.models.pipeline import LOOKUP
from deepspeed_compress.planner.layout import Layout, stages
from deepspeed_compress.planner.model import Model
from tests.planner.jobs import LLAMA_1B, LLAMA_7B, LLAMA_70B, TOY


def pipeline(count: int, **changed: object) -> Layout:
    return replace(Layout(1, count, 1, 1, 1, 8), **changed)  # type: ignore[arg-type]  # fields of several types


@pytest.mark.parametrize(("model", "count"), [(TOY, 2), (LLAMA_1B, 4), (LLAMA_7B, 2), (LLAMA_7B, 8), (LLAMA_70B, 8)])
def test_layers_are_those_of_the_balanced_partition(model: Model, count: int) -> None:
    head = model.vocab * model.hidden
    costs = [LOOKUP * model.embedding_parameters, *[model.layer_parameters] * model.layers, head]
    bounds = partition_balanced([round(10 * cost) for cost in costs], count)
    sizes = [after - before for before, after in itertools.pairwise(bounds)]
    first, *middle, last = [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1]
    expected = [first, max(middle), last] if middle else [first, last]
    assert [stage.layers for stage in stages(model, pipeline(count))] == expected


def test_the_first_stage_has_the_embedding_and_the_last_the_head() -> None:
    first, middle, last = stages(LLAMA_7B, pipeline(4, engine="megatron"))
    layers, table = 8 * LLAMA_7B.layer_parameters, 32000 * 4096
    assert [stage.parameters for stage in (first, middle, last)] == [layers + table, layers, layers + table]
    assert [stage.has_head for stage in (first, middle, last)] == [False, False, True]
    assert [stage.behind for stage in (first, middle, last)] == [3, 2, 0]
    assert first.tied == last.tied == 0


def test_both_ends_have_a_tied_embedding() -> None:
    first, last = stages(TOY, pipeline(2))
    assert first.tied == last.tied == last.parameters == 4096 * 128
    assert first.parameters == 3 * TOY.layer_parameters + (4096 + 256) * 128
    [alone] = stages(TOY, pipeline(1))
    assert (alone.parameters, alone.tied) == (TOY.parameters, 0)


def test_tensor_ranks_share_a_stage() -> None:
    whole, half = (stages(LLAMA_7B, pipeline(2, tensor=size))[0] for size in (1, 2))
    assert whole.parameters == 2 * half.parameters
