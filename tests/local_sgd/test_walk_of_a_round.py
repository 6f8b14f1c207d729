"""Number of functions between DeepSpeed's seam and new weights in a round.

It must stay small enough to read at once.
"""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.island_jobs import run_apart, section
from tests.support.jobs import Job, data, run, start

MOST_FUNCTIONS, MOST_FILES = 20, 8
ROOMS = ("backends/", "local_sgd/", "session/")
SEAM = "Session.exchange_with_islands"
LANDMARKS = frozenset({"CoordinatorClient.arrive", "Peers.start", "CoordinatorClient.vote", "AnchorState.move"})
"""Functions that a round must reach, besides those that publish the new weights."""
Function = tuple[str, str]
"""File below the package, and qualified name."""


class Trace:
    """Functions on the stack when a landmark is reached, and when the new weights are written and published.

    Attributes:
        walk: the functions, in the order of the round.
    """

    def __init__(self) -> None:
        self.walk: dict[Function, None] = {}
        self._is_running = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if name == SEAM:
            self._is_running = event == "call"
        if not self._is_running or event != "call":
            return
        if name in LANDMARKS or name.startswith("_publish") or name == "FlatMasterWeights.write":
            self.walk |= dict.fromkeys(reversed(list(functions(frame))))


def functions(frame: FrameType | None) -> Iterator[Function]:
    """Yield the running functions of `ROOMS`, innermost first. Comprehensions belong to their function."""
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/deepspeed_compress/")
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        if found and file.startswith(ROOMS):
            yield file, name
        frame = frame.f_back


def trace_round(rank: int, job: Job) -> list[Function]:
    """Return the walk of the second exchange of an island with one rank."""
    engine = start(job)
    batches = data(rank, job)
    run(engine, batches[:1])
    trace = Trace()
    sys.setprofile(trace)
    try:
        run(engine, batches[1:2])
    finally:
        sys.setprofile(None)
    engine.destroy()
    return list(trace.walk)


def check_walk(walk: list[Function], landmarks: frozenset[str]) -> None:
    """Check that the walk of a round begins at the seam, reaches all landmarks, and is short."""
    names = [name for _, name in walk]
    assert names[:2] == ["OptimizerStep.take", SEAM]
    assert landmarks <= set(names)
    assert any(name.startswith("_publish") for name in names)
    assert len(walk) <= MOST_FUNCTIONS, walk
    assert len({file for file, _ in walk}) <= MOST_FILES, walk


@pytest.mark.parametrize("more", [{}, {"fragments": 1, "second_moments": {}}])
def test_the_walk_of_an_exchange_of_fixed_islands_is_short(more: Mapping[str, Any]) -> None:
    [walk, _] = run_forks(2, trace_round, Job(1, section(size=1, sync_every=1, **more), steps=3))
    check_walk(walk, frozenset({"Peers.start", "AnchorState.move"}))


def test_the_walk_of_a_round_is_short() -> None:
    [walk, _] = run_apart(2, trace_round, Job(1, steps=3), sync_every=1)
    check_walk(walk, LANDMARKS)
