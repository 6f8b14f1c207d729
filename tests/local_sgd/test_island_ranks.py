"""Ranks of an island: what fails on the first one is known to all of them."""

import pytest
import torch.distributed as dist

from deepspeed_compress.errors import CompressError, ConfigError, IslandError
from deepspeed_compress.local_sgd.strategy import IslandRanks, LeaderDecision, SyncInterval
from tests.support.forks import run_forks


def fail(error: Exception) -> None:
    raise error


def failing(rank: int) -> list[str]:
    """Return what each rank raises if work on the first one fails, and then the result of work that does not."""
    dist.init_process_group("gloo")
    ranks, found = IslandRanks(dist.new_group(backend="gloo")), []
    for error in (PermissionError("no space"), ConfigError("wrong")):
        with pytest.raises((OSError, CompressError)) as raised:
            ranks.run_on_first(fail, error)
        found.append(f"{raised.type.__name__}: {raised.value}")
    return [*found, ranks.run_on_first(str, rank)]


def test_errors_of_the_first_rank_are_raised_on_all_ranks() -> None:
    first, second = run_forks(2, failing, timeout=60)
    assert first == ["PermissionError: no space", "ConfigError: wrong", "0"]
    failed = f"{IslandError.__name__}: the first rank of this island has failed: PermissionError('no space')"
    assert second == [failed, "ConfigError: wrong", "0"]


def deciding(rank: int, steps: int) -> list[int]:
    """Return the steps that end with an exchange, where the first rank also decides so at step 4."""
    dist.init_process_group("gloo")
    decision, interval, found = (
        LeaderDecision(IslandRanks(dist.new_group(backend="gloo"))),
        SyncInterval(steps, None),
        [],
    )
    for step in range(1, 10):
        if decision.follow(rank == 0 and step == 4, interval.count_step()):
            interval.restart()
            found.append(step)
    return found


@pytest.mark.parametrize(("steps", "expected"), [(1, [*range(1, 10)]), (3, [3, 5, 8]), (4, [4, 8])])
def test_all_ranks_exchange_after_as_many_steps_as_configured(steps: int, expected: list[int]) -> None:
    """What the first rank alone decides is followed one step later, unless that exchange has already happened."""
    assert run_forks(2, deciding, steps, timeout=60) == [expected, expected]
