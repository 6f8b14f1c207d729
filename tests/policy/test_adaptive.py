"""Which candidate is chosen, from measurements that say what each costs and loses."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import SECTION, brief, find_problems, parse_section
from deepspeed_compress.engine.probing import Prober
from deepspeed_compress.errors import CompressWarning
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


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_that_are_not_finite_tell_nothing_and_are_measured_again_soon(norm: float) -> None:
    adaptation = Adaptation(section(probe_every=50))
    unknown = replace(seen(1e6), norms=(norm,), errors=((norm,), (0.0,), (norm,), (norm,)))
    before, after, evidence = adaptation.choose(2, unknown)
    assert (before, evidence) == (after, {})
    assert next(step for step in range(3, 60) if adaptation.due(step)) == 10


def test_a_codec_that_overflows_is_not_chosen() -> None:
    """The gradients are finite, and what one candidate makes of them is not."""
    found = replace(seen(1e6), errors=((1e-4,), (0.0,), (math.nan,), (math.inf,)))
    assert adaptive(max_error=1.0).choose((1,), found).candidates == (0,)


def test_gradients_of_zero_and_ranks_that_send_nothing_choose_the_gentlest() -> None:
    nothing = Measurement(((0.0,),) * 4, (0.0,), ((0.0,),) * 4, CODEC, AlphaBeta(0.0, 0.0), 0.0, 0.0)
    assert adaptive().choose((2,), nothing).candidates in {(0,), (1,), (2,), (3,)}
    lossy = replace(nothing, norms=(1.0,), errors=tuple((error,) for error in ERRORS))
    assert brief(adaptive().settings(adaptive().choose((0,), lossy).candidates)) == "none"


def test_what_a_candidate_does_not_send_costs_no_encoding_in_its_group_alone() -> None:
    """Candidate 3 sends nothing at all, and 0 of the second group alone."""
    found = replace(seen(1e8, groups=2), sizes=((0.0, 1.0), (0.0, 4.0), (0.0, 1.0), (0.0, 0.0)))
    assert found.seconds((3, 0), (1, 1)) == pytest.approx(CODEC[0], rel=1e-3)


def loaded(saved: dict[str, Any], **settings: Any) -> Adaptation:
    found = Adaptation(section(**settings))
    found.load(json.loads(json.dumps(saved)))
    return found


def chosen(*candidates: int, **settings: Any) -> dict[str, Any]:
    found = Adaptation(section(**settings))
    found._choice = candidates
    return found.saved()


def test_a_saved_choice_is_a_setting_whatever_the_order_of_candidates_is() -> None:
    two_bits = chosen(3)
    assert brief(loaded(two_bits).settings) == "blockwise bits=2"
    assert brief(loaded(two_bits, candidates=[{"bits": 2}, {"method": "sign"}]).settings) == "blockwise bits=2"
    assert loaded(two_bits).saved() == two_bits


def test_a_saved_choice_belongs_to_a_pattern_whatever_the_order_of_groups_is() -> None:
    saved = chosen(3, 2, 0, groups=["embed", "head"])
    found = loaded(saved, groups=["head", "embed"])
    assert found._choice == (2, 3, 0)


def test_of_equal_patterns_the_first_is_saved() -> None:
    assert loaded(chosen(3, 2, 0, groups=["embed", "."]), groups=["embed", "."])._choice[:2] == (3, 2)


@pytest.mark.parametrize("settings", [{"candidates": [{"bits": 4}]}, {"groups": ["embed"]}])
def test_a_choice_that_is_no_candidate_any_more_gives_way_to_what_is_written(settings: dict[str, Any]) -> None:
    saved = chosen(3)
    with pytest.warns(CompressWarning, match="no choice that is still among the candidates"):
        found = loaded({**saved, "next": 90, "last": 40}, **settings)
    assert brief(found.adaptive.settings((found._choice[0],) * len(found._choice))) == "blockwise bits=8"
    assert found.due(48)


def test_places_of_a_state_of_before_mean_nothing() -> None:
    with pytest.warns(CompressWarning, match="until the next measurement"):
        found = loaded({**chosen(3), "choice": [3]})
    assert brief(found.settings) == "blockwise bits=8"


def test_an_empty_segment_has_no_sample() -> None:
    prober = Prober(adaptive(), str, 4, torch.device("cpu"))
    segments = (Segment("a", 0, 0, 0, 0), Segment("b", 0, 8, 0, 1))
    prober.see(torch.ones(8), Partition(segments, 2), 0, everywhere=False)
    assert [piece.numel() for piece in prober._samples[0].pieces] == [8]


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
    assert words in problem.message
