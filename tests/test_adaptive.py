"""Which candidate is chosen, from measurements that say what each costs and loses."""

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_compress.config import SECTION, brief, find_problems, parse_section
from deepspeed_compress.policy import Adaptive, AlphaBeta, Measurement
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.adaptive import allocate
from deepspeed_compress.policy.observation import Observation

MB = 1e6
GRADIENTS = {"bits": 8}
CANDIDATES = [{"bits": 4}, {"bits": 2}]
"""After what is written, 8 bits, and none: 0 is 8 bits, 1 none, 2 and 3 these."""
ERRORS = (1e-4, 0.0, 0.02, 0.2)
"""Squared, relative."""
SIZES = (10 * MB, 40 * MB, 5 * MB, 2.5 * MB)
CODEC = (0.01, 0.0, 0.01, 0.02)


def adaptive(**settings: Any) -> Adaptive:
    return Adaptive(section(**settings))


def section(**settings: Any) -> Any:
    adapts = {"candidates": CANDIDATES, "max_error": 0.3, **settings}
    return parse_section({SECTION: {"gradients": GRADIENTS, "adaptive": adapts}})


def seen(rate: float, waited: float = 1e9, groups: int = 1) -> Measurement:
    """Of a link of `rate` bytes a second; with `waited` larger than any message takes, none is hidden."""
    share = 1 / groups
    return Measurement(
        errors=tuple((error * share,) * groups for error in ERRORS),
        norms=(share,) * groups,
        sizes=tuple((size * share,) * groups for size in SIZES),
        codec_seconds=CODEC,
        link=AlphaBeta(1e-4, 1 / rate),
        waited=waited,
        step=0.5,
    )


@pytest.mark.parametrize(
    ("rate", "chosen"),
    [(100e9 / 8, "none"), (10e9 / 8, "blockwise bits=8"), (1e9 / 8, "blockwise bits=4"), (1e8 / 8, "blockwise bits=4")],
)
def test_the_slower_the_link_the_fewer_bytes(rate: float, chosen: str) -> None:
    found = adaptive()
    assert brief(found.settings(found.choose((0,), seen(rate)).candidates)) == chosen


def test_what_loses_too_much_is_never_chosen() -> None:
    assert adaptive(max_error=0.5).choose((0,), seen(1e6)).candidates == (3,)
    assert adaptive(max_error=0.4).choose((0,), seen(1e6)).candidates == (2,)
    assert adaptive(max_error=0.001).choose((0,), seen(1e6)).candidates == (1,)


def test_hidden_messages_cost_nothing() -> None:
    """Uncompressed messages take 0.32 s, all of it during backward."""
    assert adaptive().choose((1,), seen(1e9 / 8, waited=0.0)).candidates == (1,)
    assert adaptive().choose((1,), seen(1e9 / 8, waited=0.3)).candidates == (2,)


def test_a_little_faster_is_no_reason_to_lose_more() -> None:
    """At 5 Gbit/s 4 bits save 8 ms of a step of 500 ms against 8 bits; at 20 Gbit/s 8 bits save 2 ms against none."""
    assert adaptive().choose((0,), seen(5e9 / 8)).candidates == (0,)
    assert adaptive().choose((2,), seen(20e9 / 8)).candidates == (1,)


def test_the_evidence_says_why() -> None:
    evidence = adaptive().choose((1,), seen(1e9 / 8)).evidence
    assert evidence["bandwidth"] == pytest.approx(1e9 / 8)
    assert evidence["seconds_before"] == pytest.approx(0.32)
    assert evidence["seconds"] == pytest.approx(0.01 + 0.04)
    assert evidence["error"] == pytest.approx(0.02**0.5)


def test_bytes_go_where_they_remove_most_error() -> None:
    even = seen(1e8, groups=2)
    # All that 2 bits lose is lost in the second group.
    uneven = replace(even, errors=tuple((0.02 * error, 1.98 * error / 2) for error in ERRORS))
    assert uneven.error((3, 3)) > 0.3
    choice = allocate(uneven, 0.3)
    assert choice == (3, 2)
    assert uneven.error(choice) <= 0.3
    assert uneven.bytes(choice) < uneven.bytes((2, 2))
    found = adaptive(groups=["embed"])
    settings = found.settings(found.choose((0, 0), uneven).candidates)
    assert brief(settings) == "blockwise bits=4"
    assert [(one.parameters, one.bits) for one in settings.overrides] == [("embed", 2)]


def test_a_group_may_go_uncompressed_while_another_does_not() -> None:
    found = adaptive(groups=["embed"])
    first, second = found.settings((1, 2)), found.settings((2, 1))
    assert [(one.parameters, one.method) for one in first.overrides] == [("embed", "none")]
    assert [(one.parameters, one.method) for one in second.overrides] == [("embed", "blockwise"), (".", "none")]


def test_it_is_measured_every_so_often_and_when_steps_get_slow() -> None:
    adaptation = Adaptation(section(probe_every=50))
    assert [adaptation.due(step) for step in range(3)] == [False, True, True]
    adaptation.choose(2, seen(1e9))
    assert not any(adaptation.due(step) for step in range(2, 52))
    assert adaptation.due(52)
    for step in range(3, 20):
        adaptation.observe(Observation(step, step_ms=100.0))
        assert not adaptation.due(step)
    for step in range(20, 23):
        assert not adaptation.due(step)
        adaptation.observe(Observation(step, step_ms=160.0))
    assert adaptation.due(22)
    adaptation.choose(23, seen(1e9))
    assert not adaptation.due(24)


WRONG = [
    ({"gradients": {"method": "demo"}, "adaptive": {}}, "/gradients/method", "one message does not tell"),
    ({"adaptive": {"candidates": [{"method": "powersgd"}]}}, "/candidates/0/method", "one message does not tell"),
    ({"adaptive": {"candidates": [{"bits": 5}]}}, "/adaptive/candidates/0/bits", "5 is not accepted"),
    ({"gradients": {"method": "none"}, "adaptive": {}}, "/adaptive", "leaves reduction to DeepSpeed"),
    ({"adaptive": {}, "schedule": {"ramp": {"steps": 9, "stages": [{}]}}}, "/adaptive", "schedule.ramp"),
    ({"adaptive": {"groups": ["("]}}, "/adaptive/groups/0", "not a regular expression"),
]


@pytest.mark.parametrize(("raw", "place", "words"), WRONG)
def test_what_cannot_adapt_is_refused(raw: dict[str, Any], place: str, words: str) -> None:
    [problem] = find_problems({SECTION: raw})
    assert problem.pointer.endswith(place)
    assert words in problem.what
