"""Tests of reductions that a failed backward pass has begun."""

from unittest import mock

import torch.distributed as dist

from deepspeed_compress.session.gradients import discard
from tests.support.forks import run_forks
from tests.support.two_branches import start


def discard_nothing(rank: int) -> None:
    """Compare the numbers of reductions in a group that refuses tensors in host memory, as groups of NCCL do."""
    start()
    refusal = RuntimeError("No backend type associated with device type cpu")
    with mock.patch.object(dist, "all_gather", side_effect=refusal):
        discard([], dist.group.WORLD)


def test_ranks_compare_what_they_have_begun_with_any_backend() -> None:
    assert run_forks(2, discard_nothing) == [None] * 2
