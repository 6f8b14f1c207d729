"""Buckets are sent when they are full, during backward, and awaited at the end."""

from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_compress.backends.deepspeed.engine_facts import bucket_size
from deepspeed_compress.backends.deepspeed.gradients.zero_3 import _Buckets
from deepspeed_compress.planner import traffic
from tests.support.forks import run_forks
from tests.support.jobs import Job, Outcome, data, run, start, weights
from tests.support.methods import BF16, FP16, OFFLOAD

SAMPLED = pytest.mark.sampled(4)

INT4 = {"gradients": {"bits": 4, "block_size": 32}}
SMALL = {"reduce_bucket_size": 200}


BUCKETS_3 = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def buckets_of(engine: Any) -> _Buckets:
    """Return the object behind the replacement of DeepSpeed's method, which `wrap` wrapped into a partial."""
    return engine.optimizer.independent_gradient_partition_epilogue.func.__self__


def watch_buckets(rank: int, job: Job) -> tuple[list[int], list[int]]:
    """Return the number of pending buckets after each one is sent and at the end of every step.

    Also return the number of gradients that still hold memory at the end of every step.
    """
    engine = start(job)
    optimizer, waiting, held = engine.optimizer, [], []
    name = BUCKETS_3 if job.stage == 3 else "gradient_reduction_w_predivide"
    later = None if job.stage == 3 else optimizer.reduce_ipg_grads.__self__
    reduce = getattr(optimizer, name)

    def pending() -> int:
        return len(buckets_of(engine)._deferred if later is None else later.pending)

    def watched(bucket: Any, *arguments: object) -> object:
        result = reduce(bucket, *arguments)
        # If the first gradient fills a bucket alone, DeepSpeed first closes an empty bucket, except under ZeRO 3.
        if job.stage == 3 or len(bucket):
            waiting.append(pending())
        return result

    setattr(optimizer, name, watched)
    for batch in data(rank, job):
        run(engine, [batch])
        waiting.append(pending())
        held.append(sum(parameter.grad is not None for parameter in engine.module.parameters()))
    engine.destroy()
    return waiting, held


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_wait_for_each_other_until_the_last_one(stage: int) -> None:
    """Gradients of 31 x 12, 31 x 17, 17 and fewer elements make four buckets of up to 200 elements."""
    for waiting, _ in run_forks(2, watch_buckets, Job(stage, INT4, SMALL, steps=2)):
        assert waiting == [1, 2, 3, 4, 0] * 2


def test_buckets_of_zero_3_wait_for_each_other_too() -> None:
    """A weight precedes its bias here, so 31 x 12, 31, 31 x 17 and 17 elements make a bucket each."""
    for waiting, held in run_forks(2, watch_buckets, Job(3, INT4, SMALL, steps=2)):
        assert waiting == [1, 2, 3, 4, 5, 0] * 2
        assert held == [0, 0]


DEFERRED = {
    "fp32": Job(3, INT4, SMALL),
    "micro-steps": Job(3, INT4, SMALL, accumulation=3),
    "bf16": Job(3, INT4, SMALL, BF16),
    "NaN": Job(3, INT4, SMALL, FP16, poison=(1, 1)),
    "offload": Job(3, INT4, {**SMALL, **OFFLOAD}, accumulation=2),
    "contiguous": Job(3, INT4, {**SMALL, "reduce_scatter": False}),
}


def with_and_without(rank: int, job: Job) -> tuple[Outcome, Outcome]:
    return outcome(rank, job, defers=True), outcome(rank, job, defers=False)


def outcome(rank: int, job: Job, defers: bool) -> Outcome:
    engine = start(job)
    assert buckets_of(engine).defers
    buckets_of(engine).defers = defers
    losses = run(engine, data(rank, job))
    seen = Outcome(losses, weights(engine), engine.skipped_steps)
    engine.destroy()
    return seen


@SAMPLED
@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_buckets_have_the_bits_of_those_that_are_waited_for_at_once(name: str) -> None:
    for deferred, at_once in run_forks(2, with_and_without, DEFERRED[name]):
        assert repr(deferred) == repr(at_once)
        assert deferred.skipped == (name == "NaN")


def lane_of(rank: int, hierarchy: dict[str, int] | None) -> list[int]:
    """Return the ranks of the group for messages from owners."""
    engine = start(Job(2, {"gradients": {**INT4["gradients"], "hierarchy": hierarchy}}, SMALL))
    reducer = engine.compression.gradients.reducer
    ranks = dist.get_process_group_ranks((reducer.across if hierarchy else reducer).link.downward)
    engine.destroy()
    return ranks


def test_messages_downward_have_connections_of_their_own() -> None:
    assert run_forks(2, lane_of, None) == [[0, 1]] * 2
    assert run_forks(4, lane_of, {"ranks_per_node": 2}) == [[0, 2], [1, 3]] * 2


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_size_is_chosen_where_none_is_given(stage: int) -> None:
    [(size, given)] = set(run_forks(2, bucket_sizes, stage))
    assert (size, given) == (1_000_000, 200)


@pytest.mark.parametrize(
    ("numel", "size"), [(10**6, 10**6), (80 * 10**6, 10**7), (10**9, 5 * 10**7), (10**10, 5 * 10**7)]
)
def test_a_bucket_is_an_eighth_of_the_model_within_limits(numel: int, size: int) -> None:
    assert bucket_size(numel) == traffic.bucket_size(numel, 4, 0) == size


def bucket_sizes(rank: int, stage: int) -> tuple[int, int]:
    chosen, given = start(Free(stage, INT4)), start(Job(stage, INT4, SMALL))
    sizes = chosen.optimizer.reduce_bucket_size, given.optimizer.reduce_bucket_size
    chosen.destroy()
    given.destroy()
    return sizes


class Free(Job):
    """Job whose configuration has no bucket size."""

    def config(self) -> dict[str, object]:
        config = super().config()
        del config["zero_optimization"]["reduce_bucket_size"]
        return config
