"""Comparisons of runs detect different bits, and delays detect code that does not wait."""

from dataclasses import dataclass
from typing import Any

import pytest

from deepspeed_compress.collectives import exchange
from deepspeed_compress.collectives.exchange import PendingExchange
from tests.gpu.delays import LATE_MIRROR
from tests.gpu.ranks import Outcome, run_ranks
from tests.gpu.runs import DIFFERENT, difference_of, problem_in_mirror, problem_of, run_of


def run(number: int, **other: Any) -> dict[str, Any]:
    return {"stage": 1, "run": number, "losses": [2.0, 1.0], "weights": "abc", "error": ""} | other


def outcome(*changes: tuple[int, int, dict[str, Any]], runs: int = 4, trouble: str = "") -> Outcome:
    """Return an outcome of two ranks whose runs are all equal, except for `changes`: (rank, run, what differs)."""
    results = [[run(number) for number in range(runs)] for _ in range(2)]
    for rank, number, other in changes:
        results[rank][number] |= other
    return Outcome(tuple(map(tuple, results)), trouble)


def difference(found: Outcome, *numbers: int) -> str:
    first, *others = (run_of(found, 1, number) for number in (0, *numbers))
    return difference_of(first, others, 2, found.trouble)


def test_equal_runs_are_equal() -> None:
    assert problem_of(run_of(outcome(), 1, 0), 2, "") == difference(outcome(), 1, 2, 3) == ""


@pytest.mark.parametrize("other", [{"weights": "abd"}, {"losses": [2.0, 1.0000001]}])
def test_other_bits_are_found(other: dict[str, Any]) -> None:
    found = outcome((0, 3, other), (1, 3, other))
    assert (difference(found, 1, 2), difference(found, 2, 3)) == ("", DIFFERENT)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [("aaaa", ""), ("aaab", DIFFERENT), ("abaa", "two undisturbed runs differ"), ("aaa", "it did not get there")],
)
def test_late_messages_must_not_change_a_bit(weights: str, problem: str) -> None:
    runs = tuple(run(number, weights=weight) for number, weight in enumerate(weights))
    assert problem_in_mirror(Outcome((runs,), ""), 1, 4) == problem
    wrong = tuple(one | {"error": "no such operation"} for one in runs)
    assert problem_in_mirror(Outcome((wrong,), ""), 1, 4) == "no such operation"


@dataclass(frozen=True)
class Careless(PendingExchange):
    """Exchange that does not wait for its messages."""

    def receive(self) -> None:
        self.receives.clear()


def careless(job: Any) -> Any:
    """Train on a rank without waiting for messages."""
    from tests.gpu.programs import train_in_mirror

    exchange.PendingExchange = Careless  # type: ignore[misc]
    yield from train_in_mirror(job)


def mirrored(work: str) -> Outcome:
    job = {"device": "cpu", "backend": LATE_MIRROR, "seeds": (None, None, 1, 2)}
    return run_ranks(1, work, job, 300, {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_step_that_does_not_wait_is_found() -> None:
    good, bad = mirrored("tests.gpu.programs:train_in_mirror"), mirrored("tests.gpu.test_runs:careless")
    assert [problem_in_mirror(good, stage, 4) for stage in range(4)] == [""] * 4
    assert all(problem_in_mirror(bad, stage, 4) for stage in range(4)), bad
