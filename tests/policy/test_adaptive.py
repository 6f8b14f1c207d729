"""The choice among candidates, given measurements of their costs and errors."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import SECTION, brief, parse_section
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.decider import Observation, StepPlan
from deepspeed_compress.policy.measurement import AlphaBeta, Choice, Measurement
from deepspeed_compress.policy.selector import CURVES, CandidateSelector, allocations, penalty
from deepspeed_compress.session.probing import Prober

MB = 1e6
GRADIENTS = {"bits": 8}
CANDIDATES = [{"bits": 4}, {"bits": 2}]
"""Candidates 2 and 3. Candidate 0 is the configured setting (8 bits), candidate 1 is no compression."""
ERRORS = (1e-4, 0.0, 0.02, 0.2)
"""Squared relative errors, by candidate."""
SIZES = (10 * MB, 40 * MB, 5 * MB, 2.5 * MB)
CODEC = (0.01, 0.0, 0.01, 0.02)
STEP = 500
"""Number of optimizer steps done."""


def adaptive(**settings: Any) -> CandidateSelector:
    return CandidateSelector(section(**settings))


def section(**settings: Any) -> Any:
    adapts = {"candidates": CANDIDATES, **settings}
    return parse_section({SECTION: {"gradients": GRADIENTS, "adaptive": adapts}})


def measured(rate: float, waited: float = 1e9, groups: int = 1) -> Measurement:
    """Return a measurement on a link of `rate` bytes per second. By default, no message is hidden."""
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
    [(100e9 / 8, "none"), (10e9 / 8, "blockwise bits=8"), (1e9 / 8, "blockwise bits=4"), (1e8 / 8, "blockwise bits=2")],
)
def test_a_slower_link_gets_fewer_bytes(rate: float, chosen: str) -> None:
    found = adaptive(margin=0.0)
    assert brief(found.settings(found.choose(Choice((0,)), measured(rate), STEP).choice.gradients)) == chosen


RATES = {
    "100 Mbit/s": {"none": 8.531, "bits=8": 1.815, "bits=4": 1.357, "bits=2": 1.091, "sign": 1.019, "topk 10": 1.215},
    "1 Gbit/s": {"none": 1.416, "bits=8": 0.775, "bits=4": 0.697},
}
"""Seconds per step on four emulated hosts (docs/results.md, "Adaptive")."""
RELATIVE_ERRORS = {"none": 0.0, "bits=8": 0.008, "bits=4": 0.14, "bits=2": 0.38, "sign": 0.65, "topk 10": 0.65}
"""Relative errors of the gradients in these runs."""


@pytest.mark.parametrize(
    ("rate", "step", "best"),
    [
        ("100 Mbit/s", 2, "bits=4"),
        ("100 Mbit/s", 90, "bits=4"),
        ("1 Gbit/s", 2, "bits=4"),
        ("100 Mbit/s", 800, "bits=2"),
    ],
)
def test_the_fastest_setting_of_recorded_runs_is_chosen_from_any_start(rate: str, step: int, best: str) -> None:
    """The recording has step times, not message times, so they are passed as codec times."""
    seconds = RATES[rate]
    recorded = Measurement(
        errors=tuple((RELATIVE_ERRORS[name] ** 2,) for name in seconds),
        norms=(1.0,),
        sizes=((1.0,),) * len(seconds),
        codec_seconds=tuple(seconds.values()),
        link=AlphaBeta(0.0, 0.0),
        waited=0.0,
        step=0.0,
    )
    found = adaptive()
    found.candidates = found.candidates[:1] * len(seconds)
    for now, in_force in enumerate(seconds.values()):
        choice = found.choose(Choice((now,)), replace(recorded, step=in_force), step)
        assert list(seconds)[choice.choice.gradients[0]] == best
        assert choice.evidence["predicted"] == pytest.approx(seconds[best] * penalty(RELATIVE_ERRORS[best], step))


def test_the_penalty_of_an_error_falls_during_training() -> None:
    for step, curve in CURVES.items():
        assert [penalty(error, step) for error, _ in curve[:-1]] == pytest.approx([steps for _, steps in curve[:-1]])
    for error in (0.1, 0.4, 0.9):
        steps = [penalty(error, step) for step in (0, 1, 90, 200, 499, 500, 10**6)]
        assert steps == sorted(steps, reverse=True)
        assert steps[2] > steps[3] > steps[4] > steps[5] == steps[6] >= 1


@pytest.mark.parametrize("step", [2, 90, 200, 500, 10**6])
def test_a_larger_error_never_has_a_smaller_penalty(step: int) -> None:
    found = [penalty(error / 1000, step) for error in range(1000)]
    assert found == sorted(found)
    assert found[0] == 1


@pytest.mark.parametrize("error", [math.nan, math.inf, 1.0, 3.0])
def test_an_error_that_feedback_cannot_correct_has_an_infinite_penalty(error: float) -> None:
    assert penalty(error, 10**6) == math.inf


def test_the_present_choice_stays_while_it_is_nearly_as_good() -> None:
    """At 5 Gbit/s, 4 bits save 8 ms of a 500 ms step compared with 8 bits; at 3 Gbit/s, they save 13 ms."""
    for now in ((0,), (2,)):
        assert adaptive().choose(Choice(now), measured(5e9 / 8), STEP).choice.gradients == now
    assert adaptive(margin=0.02).choose(Choice((0,)), measured(3e9 / 8), STEP).choice.gradients == (2,)
    assert adaptive(margin=0.04).choose(Choice((0,)), measured(3e9 / 8), STEP).choice.gradients == (0,)


def test_a_candidate_above_the_maximum_error_is_never_chosen() -> None:
    assert adaptive(max_error=0.5).choose(Choice((0,)), measured(1e6), STEP).choice.gradients == (3,)
    assert adaptive(max_error=0.4).choose(Choice((0,)), measured(1e6), STEP).choice.gradients == (2,)
    assert adaptive(max_error=0.001).choose(Choice((0,)), measured(1e6), STEP).choice.gradients == (1,)


def test_the_default_maximum_error_is_lower_without_error_feedback() -> None:
    """At 8 Mbit/s, 2 bits would be fastest."""
    for gradients, chosen in ((GRADIENTS, 3), ({**GRADIENTS, "error_feedback": None}, 2)):
        raw = {"gradients": gradients, "adaptive": {"candidates": CANDIDATES}}
        found = CandidateSelector(parse_section({SECTION: raw}))
        assert found.choose(Choice((0,)), measured(1e6), STEP).choice.gradients == (chosen,)


def test_hidden_messages_cost_nothing() -> None:
    """Uncompressed messages take 0.32 s, all of it during the backward pass."""
    assert adaptive().choose(Choice((1,)), measured(1e9 / 8, waited=0.0), STEP).choice.gradients == (1,)
    assert adaptive().choose(Choice((1,)), measured(1e9 / 8, waited=0.3), STEP).choice.gradients == (2,)


def test_a_slightly_faster_candidate_is_not_chosen_if_its_error_is_larger() -> None:
    """Of a 500 ms step, 4 bits save 4 ms over 8 bits at 10 Gbit/s; 8 bits save 2 ms over none at 20 Gbit/s."""
    assert adaptive(margin=0.0).choose(Choice((0,)), measured(10e9 / 8), STEP).choice.gradients == (0,)
    assert adaptive(margin=0.0).choose(Choice((2,)), measured(20e9 / 8), STEP).choice.gradients == (1,)


def test_the_evidence_contains_the_figures_of_the_choice() -> None:
    evidence = adaptive().choose(Choice((1,)), measured(1e9 / 8), STEP).evidence
    assert evidence["bandwidth"] == pytest.approx(1e9 / 8)
    assert evidence["predicted_before"] == pytest.approx(0.5)
    assert evidence["step_seconds"] == pytest.approx(0.5 - 0.32 + 0.01 + 0.04)
    assert evidence["error"] == pytest.approx(0.02**0.5)
    assert evidence["penalty"] == penalty(0.02**0.5, STEP)
    assert evidence["predicted"] == pytest.approx(evidence["penalty"] * evidence["step_seconds"])


def test_groups_are_upgraded_where_a_byte_removes_the_most_error() -> None:
    even = measured(1e6, groups=2)
    # Almost all of the error is in the second group.
    uneven = replace(even, errors=tuple((0.02 * error, 1.98 * error / 2) for error in ERRORS))
    path = list(allocations(uneven))
    assert path[:2] == [(3, 3), (3, 2)]
    assert path[-1] == (1, 1)
    errors = [uneven.error(choice) for choice in path]
    assert errors == sorted(errors, reverse=True)
    found = adaptive(groups=["embed"], max_error=0.3)
    settings = found.settings(found.choose(Choice((0, 0)), uneven, STEP).choice.gradients)
    assert brief(settings) == "blockwise bits=4"
    assert [(override.parameters, override.bits) for override in settings.overrides] == [("embed", 2)]


def test_a_group_with_a_large_error_gets_more_bytes_without_a_maximum_error() -> None:
    """2 bits ruin only the second group, so it gets 4 bits, and the first one gets 2."""
    found = adaptive(groups=["embed"])
    ruined = tuple((error / 100, error * (4 if error == 0.2 else 1)) for error in ERRORS)
    assert found.choose(Choice((0, 0)), replace(measured(1e7, groups=2), errors=ruined), 2).choice.gradients == (3, 2)


def test_one_group_may_be_uncompressed_while_another_is_compressed() -> None:
    found = adaptive(groups=["embed"])
    first, second = found.settings((1, 2)), found.settings((2, 1))
    assert [(override.parameters, override.method) for override in first.overrides] == [("embed", "none")]
    assert [(override.parameters, override.method) for override in second.overrides] == [
        ("embed", "blockwise"),
        (".", "none"),
    ]


def adaptation_of(**settings: Any) -> tuple[Adaptation, list[Event]]:
    events: list[Event] = []
    return Adaptation(section(**settings), events.append), events


def take_step(adaptation: Adaptation, step: int, step_ms: float) -> None:
    adaptation.observe(Observation(step, step_ms=step_ms))


def measures(adaptation: Adaptation, step: int) -> bool:
    return adaptation.plan(step, StepPlan(section().gradients, section().weights)).probe


def test_the_first_measurement_is_repeated_soon_and_later_ones_periodically() -> None:
    adaptation, _ = adaptation_of(probe_every=50)
    assert [measures(adaptation, step) for step in range(3)] == [False, True, True]
    steps = [2]
    while steps[-1] < 160:
        adaptation.choose(steps[-1], measured(1e9))
        steps.append(next(step for step in itertools.count(steps[-1]) if measures(adaptation, step)))
    assert steps == [2, 10, 60, 110, 160]


def test_a_step_that_is_slow_by_chance_does_not_change_the_choice() -> None:
    """The measured step takes ten times as long as those before it."""
    slow, usual = (replace(measured(1e9 / 8), step=seconds) for seconds in (1.0, 0.1))
    undisturbed, expected = adaptation_of()
    undisturbed.choose(20, usual)
    adaptation, events = adaptation_of()
    for step in range(15, 18):
        take_step(adaptation, step, 100.0)
    adaptation.choose(20, slow)
    assert [event.after for event in events] == [event.after for event in expected] != []
    assert events[0].evidence == pytest.approx(expected[0].evidence)


def test_slower_steps_trigger_a_measurement() -> None:
    adaptation, _ = adaptation_of(probe_every=50)
    adaptation.choose(100, measured(1e9))
    for step in range(103, 120):
        take_step(adaptation, step, 100.0)
        assert not measures(adaptation, step)
    for step in range(120, 123):
        assert not measures(adaptation, step)
        take_step(adaptation, step, 160.0)
    assert measures(adaptation, 122)
    adaptation.choose(123, measured(1e9))
    assert not measures(adaptation, 124)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_measurement_of_non_finite_gradients_changes_nothing_and_is_repeated_soon(norm: float) -> None:
    adaptation, events = adaptation_of(probe_every=50)
    unknown = replace(measured(1e6), norms=(norm,), errors=((norm,), (0.0,), (norm,), (norm,)))
    before = state_of(adaptation)
    adaptation.choose(2, unknown)
    assert state_of(adaptation) == {**before, "next": 10}
    assert not events
    assert next(step for step in range(3, 60) if measures(adaptation, step)) == 10


def test_a_codec_that_overflows_is_not_chosen() -> None:
    """The gradients are finite, but the decoded gradients of two candidates are not."""
    found = replace(measured(1e6), errors=((1e-4,), (0.0,), (math.nan,), (math.inf,)))
    assert adaptive(max_error=1.0).choose(Choice((1,)), found, STEP).choice.gradients == (0,)


def test_without_messages_the_most_accurate_candidate_is_chosen() -> None:
    nothing = Measurement(((0.0,),) * 4, (0.0,), ((0.0,),) * 4, CODEC, AlphaBeta(0.0, 0.0), 0.0, 0.0)
    assert adaptive().choose(Choice((2,)), nothing, STEP).choice.gradients in {(0,), (1,), (2,), (3,)}
    lossy = replace(nothing, norms=(1.0,), errors=tuple((error,) for error in ERRORS))
    assert brief(adaptive().settings(adaptive().choose(Choice((0,)), lossy, STEP).choice.gradients)) == "none"


def test_a_group_that_sends_nothing_has_no_codec_cost() -> None:
    """Candidate 3 sends nothing at all, and candidate 0 sends only the second group."""
    found = replace(measured(1e8, groups=2), sizes=((0.0, 1.0), (0.0, 4.0), (0.0, 1.0), (0.0, 0.0)))
    assert found.seconds(Choice((3, 0)), hidden=0.0) == pytest.approx(CODEC[0], rel=1e-3)


def loaded(saved: dict[str, Any], **settings: Any) -> Adaptation:
    found, _ = adaptation_of(**settings)
    found.load(json.loads(json.dumps({"adaptation": saved})))
    return found


def chosen(*candidates: int, **settings: Any) -> dict[str, Any]:
    found, _ = adaptation_of(**settings)
    found._choice = Choice(candidates)
    return state_of(found)


def state_of(adaptation: Adaptation) -> dict[str, Any]:
    state: dict[str, Any] = adaptation.saved()["adaptation"]
    return state


def settings_of(adaptation: Adaptation) -> str:
    return brief(adaptation.plan(9, StepPlan(section().gradients, section().weights)).settings)


def test_a_saved_choice_does_not_depend_on_the_order_of_candidates() -> None:
    two_bits = chosen(3)
    assert settings_of(loaded(two_bits)) == "blockwise bits=2"
    assert settings_of(loaded(two_bits, candidates=[{"bits": 2}, {"method": "sign"}])) == "blockwise bits=2"
    assert state_of(loaded(two_bits)) == two_bits


def test_a_saved_choice_does_not_depend_on_the_order_of_groups() -> None:
    saved = chosen(3, 2, 0, groups=["embed", "head"])
    found = loaded(saved, groups=["head", "embed"])
    assert found._choice == Choice((2, 3, 0))


@pytest.mark.parametrize("settings", [{"candidates": [{"bits": 4}]}, {"groups": ["embed"]}])
def test_a_saved_setting_that_is_not_a_candidate_is_replaced(settings: dict[str, Any]) -> None:
    saved = chosen(3)
    with pytest.warns(CompressWarning, match="checkpoint's choice is no longer among the candidates"):
        found = loaded({**saved, "next": 90, "last": 40}, **settings)
    assert (
        brief(found.selector.settings((found._choice.gradients[0],) * len(found._choice.gradients)))
        == "blockwise bits=8"
    )
    assert measures(found, 48)


def test_an_empty_segment_has_no_sample() -> None:
    prober = Prober(adaptive(), Parameters({"a": (0,), "b": (8,)}, ["a", "b"]), torch.device("cpu"))
    segments = (Segment("a", 0, 0, 0, 0), Segment("b", 0, 8, 0, 1))
    prober.see(torch.ones(8), Partition(segments, 2), 0, everywhere=False)
    assert [part.numel() for part in prober._samples[0].slices] == [8]


@pytest.mark.parametrize(
    ("rates", "accepted"),
    [
        # A burst of a traffic shaper, a faster link, a slower link, and an unchanged one.
        ([100, 200, 110, 100], [100, 110, 100]),
        ([100, 200, 190, 200], [100, 190, 200]),
        ([100, 20, 25], [100, 20, 25]),
        ([100, 140, 100], [100, 140, 100]),
    ],
)
def test_a_faster_link_is_accepted_after_a_second_measurement(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], accepted: list[float]
) -> None:
    prober = Prober(adaptive(), Parameters({"a": (8,)}, ["a"]), torch.device("cpu"))
    links = iter(AlphaBeta(0.0, 1 / rate) for rate in rates)
    monkeypatch.setattr(prober, "_probe", lambda group: next(links))
    assert [prober._link(None).bandwidth for _ in accepted] == pytest.approx(accepted)
    assert next(links, None) is None


DEMO = {"method": "demo"}
POWERSGD = {"method": "powersgd"}
WRONG = [
    ({"gradients": {"method": "demo"}, "adaptive": {}}, "/adaptive", "has nothing to choose"),
    ({"gradients": DEMO, "weights": {"method": "topk"}, "adaptive": {}}, "/adaptive", "has nothing to choose"),
    ({"gradients": DEMO, "weights": {}, "adaptive": {"weights": [{}]}}, "/adaptive", "has nothing to choose"),
    (
        {"gradients": DEMO, "weights": {}, "adaptive": {"candidates": [{"bits": 4, "method": "blockwise"}]}},
        "/candidates/0/method",
        "needs an optimizer without momentum",
    ),
    ({"adaptive": {"candidates": [DEMO]}}, "/candidates/0/method", "cannot be chosen during a run"),
    (
        {"adaptive": {"candidates": [{"method": "dgc"}]}},
        "/candidates/0/method",
        '(allowed: all methods except "demo", "dgc", "powersgd")',
    ),
    (
        {"adaptive": {"candidates": [{"method": "qsgd"}]}},
        "/candidates/0/method",
        "must both keep residuals or both keep none",
    ),
    ({"adaptive": {"candidates": [POWERSGD]}}, "/candidates/0/method", "cannot be chosen during a run"),
    ({"gradients": POWERSGD, "adaptive": {}}, "/adaptive", 'gradients.method "powersgd"'),
    ({"adaptive": {"weights": [{"bits": 8}]}}, "/adaptive/weights", "leaves weights to DeepSpeed"),
    ({"weights": {}, "adaptive": {"weights": [{"bits": 5}]}}, "/adaptive/weights/0/bits", "5 is not accepted"),
    ({"weights": {}, "adaptive": {"weights": [{"method": "topk"}]}}, "/weights/0/method", "how far weights lag"),
    ({"weights": {}, "adaptive": {"weights": [{"overlap": True}]}}, "/weights/0/overlap", "cannot change during a run"),
    (
        {"weights": {"method": "topk"}, "adaptive": {"weights": [{"method": "sign"}]}},
        "/weights/method",
        "how far weights lag",
    ),
    ({"adaptive": {"candidates": [{"bits": 5}]}}, "/adaptive/candidates/0/bits", "5 is not accepted"),
    ({"gradients": {"method": "none"}, "adaptive": {}}, "/adaptive", "leaves reduction to DeepSpeed"),
    ({"adaptive": {}, "schedule": {"ramp": {"steps": 9, "stages": [{}]}}}, "/adaptive", "schedule.ramp"),
    ({"adaptive": {"groups": ["("]}}, "/adaptive/groups/0", "not a regular expression"),
]


@pytest.mark.parametrize(("raw", "place", "words"), WRONG)
def test_sections_that_cannot_adapt_are_refused(raw: dict[str, Any], place: str, words: str) -> None:
    [problem] = find_problems({SECTION: raw})
    assert problem.pointer.endswith(place)
    assert words in problem.message


def test_the_first_of_equal_patterns_is_saved() -> None:
    assert loaded(chosen(3, 2, 0, groups=["embed", "."]), groups=["embed", "."])._choice.gradients[:2] == (3, 2)
