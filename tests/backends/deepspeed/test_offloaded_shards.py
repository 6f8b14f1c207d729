"""Hybrid sharding with offloaded optimizers: means, norms, overflows and unused parameters as without offload."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, largest_difference, run, start, weights
from tests.support.methods import FP16, OFFLOAD

SAMPLED = pytest.mark.sampled(6)
NODES: Mapping[str, Any] = {"parallelism": {"shard_within": 2}}
UNCOMPRESSED: Mapping[str, Any] = {**NODES, "gradients": {"method": "none"}}
INT4: Mapping[str, Any] = {**NODES, "gradients": {"bits": 4, "block_size": 32, "min_numel": 0}}
OUR_ADAM: Mapping[str, Any] = {"zero_force_ds_cpu_optimizer": False}
Found = tuple[list[float], float, int, float, dict[str, list[float]]]


def train(rank: int, job: Job, bypassed: bool = False) -> Found:
    """Return losses, the last gradient norm, skipped steps, the loss scale, and weights.

    If `bypassed`, the second node does not use a layer in the last two steps.
    """
    engine = start(job)
    batches = data(rank, job)
    losses = run(engine, batches[:-2])
    with engine.module[5].register_forward_hook(bypass) if bypassed and rank >= 2 else nullcontext():
        losses += run(engine, batches[-2:])
    return found_by(engine, losses)


def found_by(engine: Any, losses: list[float]) -> Found:
    scale = getattr(engine.optimizer, "cur_scale", None) or engine.optimizer.loss_scale
    norm = engine.get_global_grad_norm()
    return losses, float(norm), engine.skipped_steps, float(scale), weights(engine)


def bypass(layer: Any, inputs: Any, output: Any) -> Any:
    """Return what a layer of one output gives without its weights."""
    return inputs[0].sum(dim=-1, keepdim=True)


def all_equal(found: list[Found]) -> bool:
    """Return True if all ranks have the same norms, skipped steps, loss scales and weights."""
    return all(one[1:] == found[0][1:] for one in found)


def with_offload(job: Job) -> Job:
    return replace(job, zero={**job.zero, **OFFLOAD}, extra={**job.extra, **OUR_ADAM})


def check_as_without_offload(job: Job, bypassed: bool) -> None:
    plain, offloaded = (run_forks(4, train, one, bypassed) for one in (job, with_offload(job)))
    assert all_equal(offloaded)
    for one, other in zip(plain, offloaded, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-5)
        assert other[1] == pytest.approx(one[1], rel=1e-5)
        assert largest_difference(one[4], other[4]) < 1e-5


@SAMPLED
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_without_offload(stage: int, accumulation: int) -> None:
    check_as_without_offload(Job(stage, UNCOMPRESSED, steps=5, accumulation=accumulation), bypassed=False)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_one_node_uses(stage: int) -> None:
    """ZeRO 3 does not allow it: all ranks of the job must call the same modules."""
    check_as_without_offload(Job(stage, UNCOMPRESSED, steps=5), bypassed=True)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_bits_on_all_ranks_alike(stage: int) -> None:
    found = run_forks(4, train, with_offload(Job(stage, INT4, steps=5)))
    assert all_equal(found)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_nan_in_one_node_is_skipped_by_all(stage: int) -> None:
    """Only the last rank has one. All ranks skip the step and lower the loss scale."""
    job = with_offload(Job(stage, INT4, extra=FP16, steps=5, poison=(3, 3)))
    found = run_forks(4, train, job)
    assert all_equal(found)
    assert found[0][2] == 1


def leave_a_layer_out(rank: int, job: Job) -> Found:
    """Leave a layer out after two steps. DeepSpeed goes on to step it with its last gradients, or keeps them."""
    engine, batches = start(job), data(rank, job)
    losses = run(engine, batches[:2])
    engine.module[5].register_forward_hook(bypass)
    return found_by(engine, losses + run(engine, batches[2:]))


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_no_node_uses_is_stepped_as_without_nodes(stage: int) -> None:
    """Sums over the nodes would grow with every step if its last gradients were added again."""
    sums = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "gradient_allreduce_op": "sum"}
    untested = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    job = with_offload(Job(stage, UNCOMPRESSED, extra={**sums, **untested}, steps=6))
    alone, found = (run_forks(4, leave_a_layer_out, one, timeout=60) for one in (replace(job, section=None), job))
    assert all_equal(found)
    assert largest_difference(alone[0][4], found[0][4]) < 1e-5


def give_up(rank: int, job: Job) -> Found:
    """Give up a batch whose gradients overflow on the last rank. DeepSpeed skips the step nevertheless."""
    engine, batches = start(job), data(rank, job)
    losses = run(engine, batches[:-1])
    x, y = batches[-1]
    engine.backward((engine(x.half() * (3e4 if rank == 3 else 1)).float() - y).square().mean())
    engine.optimizer.zero_grad()
    return found_by(engine, losses + run(engine, batches[-1:]))


@SAMPLED
@pytest.mark.parametrize(
    ("stage", "program", "poison", "skipped"),
    [(1, give_up, None, 1), (2, give_up, None, 1), (3, leave_a_layer_out, (1, 3), 2)],
)
def test_an_overflow_that_is_in_no_mean_is_skipped_by_all(
    stage: int, program: Any, poison: tuple[int, int] | None, skipped: int
) -> None:
    job = with_offload(Job(stage, UNCOMPRESSED, extra=FP16, steps=3, poison=poison))
    alone, found = (run_forks(4, program, one, timeout=60) for one in (replace(job, section=None), job))
    assert all_equal(found)
    assert [one[2] for one in found] == [one[2] for one in alone] == [skipped] * 4
