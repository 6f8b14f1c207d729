"""The search with synthetic results and a fake clock, and what it says on the terminal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_compress.tools.tune.search import Outcome, Result, Rung, make_rungs, search
from deepspeed_compress.tools.tune.space import BASELINE, Candidate
from tests.tools.tune.results import BASE, candidates, result

RUNGS = make_rungs(10, 3, 0.01)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fake:
    """Stand-in for `Trials`.

    Trials take `seconds` of `clock`, or as long as they may. `found` holds results of earlier calls.
    """

    results: Mapping[str, Result]
    clock: Clock = field(default_factory=Clock)
    seconds: Mapping[str, float] = field(default_factory=dict)
    found: Mapping[tuple[str, int], Result] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def find(self, candidate: Candidate, rung: Rung) -> Result | None:
        return self.found.get((candidate.name, rung.number))

    def run(self, candidate: Candidate, rung: Rung, seconds: float) -> Result:
        self.started.append((candidate.name, rung.number))
        needed = self.seconds.get(candidate.name, 10.0)
        self.clock.now += min(needed, seconds)
        return self.results[candidate.name] if needed <= seconds else Result(candidate.name, "stopped", seconds=seconds)

    def directory(self, candidate: Candidate, rung: Rung) -> Path:
        return Path("exps") / candidate.name


GOOD = {
    BASELINE: BASE,
    **{name: result(name, 0.001 * index, 60 + index, 100 - index) for index, name in enumerate("abcdefg")},
}


def run(fake: Fake, names: str = "abcdefg", seconds: float | None = None, rungs: list[Rung] = RUNGS) -> Outcome:
    end = math.inf if seconds is None else fake.clock() + seconds
    return search(candidates(*names), rungs, fake, "bytes", lambda: end - fake.clock(), fake.said.append)


def test_each_rung_tries_the_baseline_and_the_survivors() -> None:
    fake = Fake(GOOD)
    outcome = run(fake)
    assert fake.started == [
        *((name, 1) for name in [BASELINE, *"abcdefg"]),
        *((name, 2) for name in [BASELINE, *"gfe"]),
        *((name, 3) for name in [BASELINE, "g", "f"]),
    ]
    assert [len(one.results) for one in outcome.rounds] == [8, 4, 3]
    assert (outcome.stopped, outcome.failure) == ("", None)
    assert fake.said[:2] == [
        "rung 1: none, 10 steps, log exps/none/stdout.log",
        "  none                      100.0 ms a step, loss 2.0000",
    ]


def test_the_baseline_that_fails_ends_it() -> None:
    failed = Result(BASELINE, "failed", error="MemoryError", tail=("x",))
    fake = Fake({**GOOD, BASELINE: failed})
    outcome = run(fake)
    assert fake.started == [(BASELINE, 1)]
    assert outcome.failure is failed
    assert outcome.stopped == "uncompressed training failed in rung 1"


def test_the_time_budget_ends_the_trial_that_runs() -> None:
    fake = Fake(GOOD)
    outcome = run(fake, seconds=35)
    assert fake.clock.now == 135
    assert [one.status for one in outcome.rounds[0].results.values()] == ["finished"] * 3 + ["stopped"]
    assert outcome.stopped == "the time budget was used up in rung 1"


def test_finished_trials_are_not_run_again_and_need_no_time() -> None:
    found = {(name, 1): GOOD[name] for name in [BASELINE, *"abcdefg"]}
    fake = Fake(GOOD, found=found)
    outcome = run(fake, seconds=30)
    assert fake.started == [(BASELINE, 2), ("g", 2), ("f", 2)]
    assert "rung 1: a, 10 steps, 30 s left, log exps/a/stdout.log" in fake.said
    assert "  a                          60.0 ms a step, loss 2.0000, from before" in fake.said
    assert outcome.stopped == "the time budget was used up in rung 2"
    assert list(outcome.rounds[1].results) == [BASELINE, "g", "f"]


def test_a_hanging_trial_fails_and_the_search_continues() -> None:
    """The limit is three times the baseline's seconds plus one minute."""
    fake = Fake(GOOD, seconds={"c": math.inf})
    outcome = run(fake, rungs=RUNGS[:1])
    hung = outcome.rounds[0].results["c"]
    assert (hung.status, hung.error) == ("failed", "took more than 3 times as long as uncompressed training")
    assert fake.clock.now == 100 + 7 * 10 + 90
    assert len(outcome.rounds[0].results) == 8


def test_a_candidate_that_fails_does_not_end_it() -> None:
    fake = Fake({**GOOD, "g": Result("g", "failed", error="RuntimeError: no")})
    outcome = run(fake)
    assert outcome.rounds[0].results["g"].error == "RuntimeError: no"
    assert [name for name, number in fake.started if number == 2] == [BASELINE, "f", "e", "d"]


def test_nobody_survives() -> None:
    fake = Fake({BASELINE: BASE, "a": result("a", 0.5, 10), "b": result("b", 0.0, 10, 2000)})
    outcome = run(fake, "ab")
    assert len(outcome.rounds) == 1
    assert outcome.stopped == ""


def test_no_trial_begins_after_the_time_budget() -> None:
    fake = Fake(GOOD)
    outcome = run(fake, seconds=80)
    assert len(fake.started) == 8
    assert [len(one.results) for one in outcome.rounds] == [8]
    assert outcome.stopped == "the time budget was used up in rung 2"
