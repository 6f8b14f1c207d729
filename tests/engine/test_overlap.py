"""Buckets travel while backward goes on: they are sent off when they are full, and waited for at the end."""

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start

INT4 = {"gradients": {"bits": 4, "block_size": 32}}
SMALL = {"reduce_bucket_size": 200}


def count_waiting(rank: int, job: Job) -> list[int]:
    """How many buckets are under way after each that is sent, and at the end of every step."""
    engine = start(job)
    later = engine.optimizer.reduce_ipg_grads.__self__
    reduce, waiting = engine.optimizer.gradient_reduction_w_predivide, []

    def watched(bucket: torch.Tensor, *arguments: object) -> object:
        result = reduce(bucket, *arguments)
        if bucket.numel():
            # Before a first gradient that fills a bucket alone DeepSpeed closes one that is empty.
            waiting.append(len(later.pending))
        return result

    engine.optimizer.gradient_reduction_w_predivide = watched
    for batch in data(rank, job):
        run(engine, [batch])
        waiting.append(len(later.pending))
    engine.destroy()
    return waiting


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_wait_for_each_other_until_the_last_one(stage: int) -> None:
    """Gradients of 31 x 12, 31 x 17, 17 and fewer elements make four buckets of up to 200 elements."""
    for waiting in run_forks(2, count_waiting, Job(stage, INT4, SMALL, steps=2)):
        assert waiting == [1, 2, 3, 4, 0] * 2


def lane_of(rank: int, hierarchy: dict[str, int] | None) -> list[int]:
    """The ranks of the group for messages downward."""
    engine = start(Job(2, {"gradients": {**INT4["gradients"], "hierarchy": hierarchy}}, SMALL))
    reducer = engine.compression.reducer
    ranks = dist.get_process_group_ranks((reducer.across if hierarchy else reducer).link.downward)
    engine.destroy()
    return ranks


def test_messages_downward_have_connections_of_their_own() -> None:
    assert run_forks(2, lane_of, None) == [[0, 1]] * 2
    assert run_forks(4, lane_of, {"ranks_per_node": 2}) == [[0, 2], [1, 3]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_size_is_chosen_where_none_is_given(stage: int) -> None:
    [(size, given)] = set(run_forks(2, bucket_sizes, stage))
    assert (size, given) == (1_000_000, 200)


def bucket_sizes(rank: int, stage: int) -> tuple[int, int]:
    chosen, given = start(Free(stage, INT4)), start(Job(stage, INT4, SMALL))
    sizes = chosen.optimizer.reduce_bucket_size, given.optimizer.reduce_bucket_size
    chosen.destroy()
    given.destroy()
    return sizes


class Free(Job):
    """Without a bucket size of the user's."""

    def config(self) -> dict[str, object]:
        config = super().config()
        del config["zero_optimization"]["reduce_bucket_size"]
        return config
