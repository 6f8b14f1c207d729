"""Promotion of candidates, and the choice of the best one."""

import math
from dataclasses import replace

import pytest

from deepspeed_compress.tools.tune.search import (
    Result,
    Rung,
    best,
    loss_gap,
    make_rungs,
    promoted,
    reasons,
)
from tests.tools.tune.results import BASE, LAST, a_round, result


def test_rungs_grow_and_their_tolerance_narrows() -> None:
    rungs = make_rungs(30, 3, 0.005)
    assert [rung.steps for rung in rungs] == [30, 90, 270]
    assert [rung.gap for rung in rungs] == [0.02, 0.01, 0.005]
    assert [rung.slack for rung in rungs] == [0.04, 0.02, 0.0]
    assert [rung.number for rung in rungs] == [1, 2, 3]


def test_the_gap_is_relative_to_the_size_of_the_loss() -> None:
    below_zero = replace(BASE, loss=-2.0)
    assert loss_gap(replace(BASE, loss=-1.9), below_zero) == pytest.approx(0.05)
    assert loss_gap(replace(BASE, loss=math.nan), BASE) == math.inf
    assert loss_gap(BASE, replace(BASE, loss=0.0)) == math.inf


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (result("a", 0.0099, 90), ""),
        (result("a", -0.2, 90), ""),
        (result("a", 0.011, 90), "loss gap +1.10% is above 1.00%"),
        (result("a", 0.0, 101), "1.01 times the step_time of uncompressed training"),
        (replace(result("a", 0.0, 90), loss=math.nan), "loss gap +inf% is above 1.00%"),
        (Result("a", "failed", error="out of memory"), "failed"),
        (Result("a", "stopped"), "stopped"),
    ],
)
def test_faults_of_one(one: Result, reason: str) -> None:
    assert reasons(a_round(one), "step_time") == {"a": reason}


def test_short_trials_may_look_a_little_slower() -> None:
    early = Rung(1, 10, gap=0.01, slack=0.04)
    assert reasons(a_round(result("a", 0, 103.9), rung=early), "step_time") == {"a": ""}
    assert reasons(a_round(result("a", 0, 104.1), rung=early), "step_time")["a"].startswith("1.04 times")


def test_dominated_candidates_are_dropped() -> None:
    found = a_round(result("a", 0.001, 80, 90), result("b", 0.002, 80, 90), result("c", 0.0, 95, 50))
    assert reasons(found, "step_time") == {"a": "", "b": "a is as good in everything", "c": ""}


def test_the_best_third_is_promoted_in_order() -> None:
    # Candidates with more bytes are faster and have a smaller loss, so none dominates another.
    tried = [result(f"c{n}", 0.009 - n / 1000, 90 - n, 100 + n) for n in range(7)]
    assert promoted(a_round(*tried), "step_time") == ["c6", "c5", "c4"]
    assert promoted(a_round(*tried), "bytes") == ["c0", "c1", "c2"]
    assert reasons(a_round(*tried), "step_time")["c3"] == "not among the best 3"


def test_the_best_is_within_the_target_and_better_than_the_baseline() -> None:
    found = a_round(result("a", 0.008, 50), result("b", 0.004, 80), result("c", 0.0, 90), result("d", 0.0, 120))
    chosen = best([found], 0.005, "step_time")
    assert chosen is not None
    assert chosen[1].name == "b"
    assert best([found], 0.01, "step_time") == (found, found.results["a"])
    assert best([a_round(result("d", 0.0, 100), result("e", 0.5, 10))], 0.005, "step_time") is None
    assert best([], 0.005, "step_time") is None


def test_longer_trials_overrule_shorter_ones() -> None:
    first = a_round(result("a", 0.0, 50), result("b", 0.0, 60), result("c", 0.0, 70))
    second = a_round(result("a", 0.2, 50), Result("b", "failed"), rung=replace(LAST, number=2, steps=90))
    assert best([first, second], 0.005, "step_time") == (first, first.results["c"])


def test_a_trial_that_time_has_ended_says_nothing() -> None:
    first = a_round(result("a", 0.0, 50), result("b", 0.0, 60))
    second = a_round(Result("a", "stopped"), rung=replace(LAST, number=2, steps=90))
    assert best([first, second], 0.005, "step_time") == (first, first.results["a"])
    unfinished = a_round(rung=LAST, baseline=Result("none", "stopped"))
    assert best([first, unfinished], 0.005, "step_time") == (first, first.results["a"])


def test_one_that_is_out_dominates_nobody() -> None:
    found = a_round(result("a", 0.02, 50, 50), result("b", 0.005, 90, 90))
    assert promoted(found, "step_time") == ["b"]


def test_equals_do_not_dominate_each_other() -> None:
    assert set(promoted(a_round(result("a", 0, 90), result("b", 0, 90)), "step_time")) == {"a", "b"}
