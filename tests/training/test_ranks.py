"""An error on one rank is raised on all ranks."""

import deepspeed

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.ranks import AgreedError, Ranks
from tests.support.forks import run_forks


def fail_on(rank: int, bad: int, method: str) -> str:
    """Return the result or the error on this rank of a call that fails on rank `bad`."""
    deepspeed.init_distributed("gloo")
    ranks = Ranks(rank, 2, rank)

    def action() -> str:
        if rank == bad:
            raise DataError(f"rank {rank} has no data")
        return "fine"

    try:
        return str(getattr(ranks, method)(action))
    except AgreedError as error:
        return f"{error} ({type(error.__cause__).__name__})"


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    assert run_forks(2, fail_on, 1, "agree") == ["rank 1 has no data (DataError)"] * 2


def test_the_first_rank_decides_for_all() -> None:
    assert run_forks(2, fail_on, 0, "first_only") == ["rank 0 has no data (DataError)"] * 2
    assert run_forks(2, fail_on, 1, "first_only") == ["fine"] * 2


def test_without_an_error_each_rank_keeps_its_own_result() -> None:
    assert run_forks(2, fail_on, 9, "agree") == ["fine"] * 2
