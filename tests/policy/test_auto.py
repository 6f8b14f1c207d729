"""Choice between compressed and uncompressed steps: simulated programs, whose truth is known."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.models import Auto
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.auto import RUN, AutoChoice
from deepspeed_compress.session.observer import StepWatch

PAIRS = 8


@dataclass
class Program:
    """A rank that trains, on a clock of its own.

    Attributes:
        seconds: returns the seconds of a step, by number and by whether it is compressed.
        loads: returns the seconds for which the program waits for the data of a step.
        evaluates: returns the seconds of an evaluation after a step.
        shape: returns the shape of the batch of a step.
        knows: returns True if the time of a step is known.
    """

    seconds: Callable[[int, bool], float]
    loads: Callable[[int], float] = lambda step: 0.0
    evaluates: Callable[[int], float] = lambda step: 0.0
    shape: Callable[[int], tuple[int, ...]] = lambda step: (3,)
    knows: Callable[[int], bool] = lambda step: True
    events: list[Event] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.choice = AutoChoice(CompressConfig(auto=Auto(steps=PAIRS)), self.events.append)
        self.watch = StepWatch(torch.device("cpu"), lambda: self.now)

    def step(self, number: int) -> bool:
        """Take a step of two micro-steps; return what `see` returns."""
        compressed = not self.choice.alone
        for _ in range(2):
            self.now += self.loads(number) / 2
            self.watch.note_batch(torch.empty(self.shape(number)))
            self.watch.start()
            self.now += self.seconds(number, compressed) * 0.4
            self.watch.stop()
        self.watch.start()
        self.now += self.seconds(number, compressed) * 0.2
        milliseconds, shapes = self.watch.finish(timed=self.choice.times_next)
        self.now += self.evaluates(number)
        return self.choice.see(milliseconds if self.knows(number) else math.nan, shapes)


def take(programs: Sequence[Program], number: int) -> Event | None:
    """Take a step on all ranks, and return the decision after it, which is the same on all."""
    ends, *_ = [program.step(number) for program in programs]
    if not ends:
        return None
    figures = [program.choice.figures(can_switch=True) for program in programs]
    largest = [max(math.inf if math.isnan(value) else value for value in each) for each in zip(*figures, strict=True)]
    before = len(programs[0].events)
    for program in programs:
        program.choice.choose(number + 1, largest)
    first, *others = [program.events[before:] for program in programs]
    assert all(other == first for other in others)
    return first[0] if first else None


def decide(*programs: Program) -> Event:
    for number in range(1000):
        decision = take(programs, number)
        if decision is not None:
            assert {program.choice.alone for program in programs} == {not compresses(decision)}
            return decision
    raise AssertionError("no choice after 1000 steps")


def compresses(decision: Event) -> bool:
    return decision.after != "none"


def equal(number: int, compressed: bool) -> float:
    return 0.03


def twice_as_fast(number: int, compressed: bool) -> float:
    return 0.02 if compressed else 0.04


def growing(number: int, compressed: bool) -> float:
    """Return the seconds of a step whose batch is four times as large from step 13 on."""
    return twice_as_fast(number, compressed) * (4 if number >= 13 else 1)


def test_equal_speeds_stay_uncompressed() -> None:
    decision = decide(Program(equal))
    assert (compresses(decision), decision.evidence["pairs"]) == (False, PAIRS)


def test_twice_as_fast_compresses() -> None:
    decision = decide(Program(twice_as_fast))
    assert compresses(decision)
    assert decision.reason == (
        'now (uncompressed), a step takes 40 ms; "the same, 8 bits" takes 20 ms, 2 times as fast, and was faster in '
        "8 of 8 pairs, so compression stays"
    )


def test_faster_by_less_than_the_margin_stays_uncompressed() -> None:
    assert not compresses(decide(Program(lambda number, compressed: 0.0295 if compressed else 0.03)))


def test_faster_by_chance_stays_uncompressed() -> None:
    """Times with much noise show no difference of 5 %."""
    noise = random.Random(0)
    times = [noise.uniform(0.02, 0.06) for _ in range(1000)]
    decision = decide(Program(lambda number, compressed: times[number] * (0.95 if compressed else 1)))
    assert not compresses(decision)
    assert decision.evidence["faster"] <= 6


@pytest.mark.parametrize("shape", [lambda step: (12,) if step >= 13 else (3,), lambda step: (3,)])
def test_a_batch_that_grows(shape: Callable[[int], tuple[int, ...]]) -> None:
    """Also if its shape is unknown, as in a pipeline. Then the pair in which it grows is wrong."""
    decision = decide(Program(growing, shape=shape))
    assert compresses(decision)
    assert decision.evidence["pairs"] == PAIRS
    assert decision.evidence["faster"] >= PAIRS - 1


def test_pairs_before_a_change_of_shapes_do_not_count() -> None:
    program = Program(growing, shape=lambda step: (12,) if step >= 13 else (3,))
    pairs: list[list[Any]] = []
    number = 0
    while take([program], number) is None:
        pairs.append(program.choice.saved()["auto"]["pairs"])
        number += 1
    # The last pair is added by the step that decides.
    assert [uncompressed_ms for uncompressed_ms, _ in pairs[-1][-PAIRS + 1 :]] == pytest.approx([160] * (PAIRS - 1))
    assert program.events[0].evidence["pairs"] == PAIRS
    assert program.events[0].evidence["uncompressed_ms"] == pytest.approx(160)


def test_shapes_that_always_change() -> None:
    """Then all pairs count, and there are more of them."""
    shapes = random.Random(0)
    lengths = [shapes.randint(10, 100) for _ in range(1000)]

    def seconds(number: int, compressed: bool) -> float:
        return lengths[number] * (0.5 if compressed else 1) / 1000

    decision = decide(Program(seconds, shape=lambda step: (lengths[step],)))
    assert compresses(decision)
    assert decision.evidence["pairs"] == 3 * PAIRS


@pytest.mark.parametrize("slow", [4, 12, 13, 20])
def test_a_slow_start(slow: int) -> None:
    def seconds(number: int, compressed: bool) -> float:
        return 0.3 if number < slow else 0.03

    assert not compresses(decide(Program(seconds)))


def test_an_evaluation_between_steps_does_not_count() -> None:
    """Here after each uncompressed step."""
    program = Program(equal)
    program.evaluates = lambda step: 0.5 if program.choice.alone else 0.0
    decision = decide(program)
    assert not compresses(decision)
    assert decision.evidence["uncompressed_ms"] == pytest.approx(30)


def test_a_slow_loader_does_not_count_on_any_rank() -> None:
    """Rank 1 waits for data before each uncompressed step, and rank 0 waits for rank 1."""
    late, waiting = Program(equal), Program(equal)
    late.loads = lambda step: 0.06 if late.choice.alone else 0.0
    waiting.seconds = lambda step, compressed: 0.03 if compressed else 0.09
    decision = decide(waiting, late)
    assert not compresses(decision)
    assert decision.evidence["uncompressed_ms"] == pytest.approx(30)


@pytest.mark.parametrize("drift", [0.01, -0.01])
@pytest.mark.parametrize(("share", "is_faster"), [(1.0, False), (0.9, True)])
def test_drift(drift: float, share: float, is_faster: bool) -> None:
    """All steps become slower, or faster, by 1 % each."""

    def seconds(number: int, compressed: bool) -> float:
        return 0.1 * math.exp(drift * number) * (share if compressed else 1)

    assert compresses(decide(Program(seconds))) == is_faster


def test_a_time_that_is_unknown_on_one_rank_counts_on_none() -> None:
    decision = decide(Program(twice_as_fast), Program(twice_as_fast, knows=lambda step: step >= 12))
    assert compresses(decision)
    assert decision.evidence["pairs"] == PAIRS


def test_without_any_time_the_comparison_ends() -> None:
    decision = decide(Program(twice_as_fast, knows=lambda step: False))
    assert (compresses(decision), decision.reason) == (
        False,
        "no steps could be timed, so this run continues uncompressed",
    )


def test_changed_times_are_compared_again() -> None:
    """The network becomes slow after step 200, and the next comparison finds that compression helps."""

    def seconds(number: int, compressed: bool) -> float:
        return 0.03 if number < 200 else twice_as_fast(number, compressed) * 4

    program = Program(seconds)
    decisions = {number: found for number in range(400) if (found := take([program], number)) is not None}
    first, changed, second = decisions.values()
    assert not compresses(first)
    assert changed.evidence == pytest.approx({"before_ms": 30, "now_ms": 160})
    assert compresses(second)
    # Steps are looked at every 100 steps after the choice, and a change is found by the second look.
    begun = list(decisions)
    assert begun == [RUN * (PAIRS + 2) - 1, RUN * (PAIRS + 2) + 199, 2 * RUN * (PAIRS + 2) + 199]


@pytest.mark.parametrize("saved_after", range(0, 60, 7))
def test_a_saved_comparison_continues(saved_after: int) -> None:
    """Kinds of steps follow each other as without the save. Only the pair that was not seen from its beginning is
    repeated."""
    going_on, first = Program(twice_as_fast), Program(twice_as_fast)
    for number in range(saved_after):
        take([going_on], number)
        take([first], number)
    resumed = Program(twice_as_fast)
    resumed.choice.load(first.choice.saved())
    assert resumed.choice.saved() == first.choice.saved()
    kinds = [(going_on.choice.alone, resumed.choice.alone)]
    for number in range(saved_after, RUN * (PAIRS + 3)):
        take([going_on], number)
        take([resumed], number)
        kinds.append((going_on.choice.alone, resumed.choice.alone))
    until = RUN * (PAIRS + 2) - saved_after
    assert all(one == other for one, other in kinds[:until])
    assert kinds[-1] == (False, False)


def test_stopping_keeps_the_kind_of_the_last_steps() -> None:
    program: Any = Program(equal)
    while not program.step(0):
        pass
    program.choice.choose(1, program.choice.figures(can_switch=False))
    assert program.events[0].reason.startswith("other code on some rank")
    assert program.choice.alone
    assert not any(program.step(number) for number in range(300))
