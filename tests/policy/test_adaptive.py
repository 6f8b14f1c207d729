"""Which candidate is chosen, from measurements that say what each costs and loses."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.reduction import Parameters
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import SECTION, brief, find_problems, parse_section
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy import Adaptive, AlphaBeta, Choice, Measurement
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.adaptive import allocations
from deepspeed_compress.policy.observation import Observation
from deepspeed_compress.policy.penalty import CURVES, penalty
from deepspeed_compress.session.probing import Prober

MB = 1e6
GRADIENTS = {"bits": 8}
CANDIDATES = [{"bits": 4}, {"bits": 2}]
"""After what is written, 8 bits, and none: 0 is 8 bits, 1 none, 2 and 3 these."""
ERRORS = (1e-4, 0.0, 0.02, 0.2)
"""Squared, relative."""
SIZES = (10 * MB, 40 * MB, 5 * MB, 2.5 * MB)
CODEC = (0.01, 0.0, 0.01, 0.02)
STEP = 500
"""Optimizer steps done."""


def adaptive(**settings: Any) -> Adaptive:
    return Adaptive(section(**settings))


def section(**settings: Any) -> Any:
    adapts = {"candidates": CANDIDATES, **settings}
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
    [(100e9 / 8, "none"), (10e9 / 8, "blockwise bits=8"), (1e9 / 8, "blockwise bits=4"), (1e8 / 8, "blockwise bits=2")],
)
def test_the_slower_the_link_the_fewer_bytes(rate: float, chosen: str) -> None:
    found = adaptive(margin=0.0)
    assert brief(found.settings(found.choose(Choice((0,)), seen(rate), STEP).choice.gradients)) == chosen


RATES = {
    "100 Mbit/s": {"none": 8.531, "bits=8": 1.815, "bits=4": 1.357, "bits=2": 1.091, "sign": 1.019, "topk 10": 1.215},
    "1 Gbit/s": {"none": 1.416, "bits=8": 0.775, "bits=4": 0.697},
}
"""Seconds of a step on four emulated hosts (docs/results.md, "Adaptive")."""
LOST = {"none": 0.0, "bits=8": 0.008, "bits=4": 0.14, "bits=2": 0.38, "sign": 0.65, "topk 10": 0.65}
"""Relative errors of the gradients there."""


@pytest.mark.parametrize(
    ("rate", "step", "best"),
    [
        ("100 Mbit/s", 2, "bits=4"),
        ("100 Mbit/s", 90, "bits=4"),
        ("1 Gbit/s", 2, "bits=4"),
        ("100 Mbit/s", 800, "bits=2"),
    ],
)
def test_what_was_soonest_in_recorded_runs_is_chosen_whatever_is_in_force(rate: str, step: int, best: str) -> None:
    """Steps, not messages, were recorded there: a codec that takes their time stands for them."""
    seconds = RATES[rate]
    recorded = Measurement(
        errors=tuple((LOST[name] ** 2,) for name in seconds),
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
        assert choice.evidence["predicted"] == pytest.approx(seconds[best] * penalty(LOST[best], step))


def test_coarse_messages_cost_most_early() -> None:
    for step, curve in CURVES.items():
        assert [penalty(error, step) for error, _ in curve[:-1]] == pytest.approx([steps for _, steps in curve[:-1]])
    for error in (0.1, 0.4, 0.9):
        steps = [penalty(error, step) for step in (0, 1, 90, 200, 499, 500, 10**6)]
        assert steps == sorted(steps, reverse=True)
        assert steps[2] > steps[3] > steps[4] > steps[5] == steps[6] >= 1


@pytest.mark.parametrize("step", [2, 90, 200, 500, 10**6])
def test_who_loses_more_never_needs_fewer_steps(step: int) -> None:
    found = [penalty(error / 1000, step) for error in range(1000)]
    assert found == sorted(found)
    assert found[0] == 1


@pytest.mark.parametrize("error", [math.nan, math.inf, 1.0, 3.0])
def test_what_error_feedback_cannot_catch_up_takes_for_ever(error: float) -> None:
    assert penalty(error, 10**6) == math.inf


def test_what_is_in_force_stays_while_it_is_nearly_as_good() -> None:
    """At 5 Gbit/s 4 bits take 8 ms less than 8 bits, of a step of 500 ms; at 3 Gbit/s 13 ms."""
    for now in ((0,), (2,)):
        assert adaptive().choose(Choice(now), seen(5e9 / 8), STEP).choice.gradients == now
    assert adaptive(margin=0.02).choose(Choice((0,)), seen(3e9 / 8), STEP).choice.gradients == (2,)
    assert adaptive(margin=0.04).choose(Choice((0,)), seen(3e9 / 8), STEP).choice.gradients == (0,)


def test_what_loses_too_much_is_never_chosen() -> None:
    assert adaptive(max_error=0.5).choose(Choice((0,)), seen(1e6), STEP).choice.gradients == (3,)
    assert adaptive(max_error=0.4).choose(Choice((0,)), seen(1e6), STEP).choice.gradients == (2,)
    assert adaptive(max_error=0.001).choose(Choice((0,)), seen(1e6), STEP).choice.gradients == (1,)


def test_without_error_feedback_the_penalty_is_not_enough() -> None:
    """At 8 Mbit/s 2 bits would be soonest."""
    for gradients, chosen in ((GRADIENTS, 3), ({**GRADIENTS, "error_feedback": None}, 2)):
        raw = {"gradients": gradients, "adaptive": {"candidates": CANDIDATES}}
        found = Adaptive(parse_section({SECTION: raw}))
        assert found.choose(Choice((0,)), seen(1e6), STEP).choice.gradients == (chosen,)


def test_hidden_messages_cost_nothing() -> None:
    """Uncompressed messages take 0.32 s, all of it during backward."""
    assert adaptive().choose(Choice((1,)), seen(1e9 / 8, waited=0.0), STEP).choice.gradients == (1,)
    assert adaptive().choose(Choice((1,)), seen(1e9 / 8, waited=0.3), STEP).choice.gradients == (2,)


def test_a_little_faster_is_no_reason_to_lose_more() -> None:
    """At 10 Gbit/s 4 bits save 4 ms of a step of 500 ms against 8 bits; at 20 Gbit/s 8 bits save 2 ms against none."""
    assert adaptive(margin=0.0).choose(Choice((0,)), seen(10e9 / 8), STEP).choice.gradients == (0,)
    assert adaptive(margin=0.0).choose(Choice((2,)), seen(20e9 / 8), STEP).choice.gradients == (1,)


def test_the_evidence_says_why() -> None:
    evidence = adaptive().choose(Choice((1,)), seen(1e9 / 8), STEP).evidence
    assert evidence["bandwidth"] == pytest.approx(1e9 / 8)
    assert evidence["predicted_before"] == pytest.approx(0.5)
    assert evidence["step_seconds"] == pytest.approx(0.5 - 0.32 + 0.01 + 0.04)
    assert evidence["error"] == pytest.approx(0.02**0.5)
    assert evidence["penalty"] == penalty(0.02**0.5, STEP)
    assert evidence["predicted"] == pytest.approx(evidence["penalty"] * evidence["step_seconds"])


def test_bytes_go_where_they_remove_most_error() -> None:
    even = seen(1e6, groups=2)
    # All that 2 bits lose is lost in the second group.
    uneven = replace(even, errors=tuple((0.02 * error, 1.98 * error / 2) for error in ERRORS))
    path = list(allocations(uneven))
    assert path[:2] == [(3, 3), (3, 2)]
    assert path[-1] == (1, 1)
    errors = [uneven.error(choice) for choice in path]
    assert errors == sorted(errors, reverse=True)
    found = adaptive(groups=["embed"], max_error=0.3)
    settings = found.settings(found.choose(Choice((0, 0)), uneven, STEP).choice.gradients)
    assert brief(settings) == "blockwise bits=4"
    assert [(one.parameters, one.bits) for one in settings.overrides] == [("embed", 2)]


def test_groups_that_lose_much_get_more_bytes_without_a_bound_too() -> None:
    """2 bits ruin the second group alone, so it has 4, and the first one 2."""
    found = adaptive(groups=["embed"])
    ruined = tuple((error / 100, error * (4 if error == 0.2 else 1)) for error in ERRORS)
    assert found.choose(Choice((0, 0)), replace(seen(1e7, groups=2), errors=ruined), 2).choice.gradients == (3, 2)


def test_a_group_may_go_uncompressed_while_another_does_not() -> None:
    found = adaptive(groups=["embed"])
    first, second = found.settings((1, 2)), found.settings((2, 1))
    assert [(one.parameters, one.method) for one in first.overrides] == [("embed", "none")]
    assert [(one.parameters, one.method) for one in second.overrides] == [("embed", "blockwise"), (".", "none")]


def test_it_is_measured_soon_again_at_first_and_then_every_so_many_steps() -> None:
    adaptation = Adaptation(section(probe_every=50))
    assert [adaptation.due(step) for step in range(3)] == [False, True, True]
    measured = [2]
    while measured[-1] < 160:
        adaptation.choose(measured[-1], seen(1e9))
        measured.append(next(step for step in itertools.count(measured[-1]) if adaptation.due(step)))
    assert measured == [2, 10, 60, 110, 160]


def test_a_step_that_was_slow_by_chance_is_not_taken_for_all() -> None:
    """The measured one takes ten times as long as those before it."""
    slow, usual = (replace(seen(1e9), step=seconds) for seconds in (1.0, 0.1))
    expected = Adaptation(section()).choose(20, usual)[2]
    adaptation = Adaptation(section())
    for step in range(15, 18):
        adaptation.observe(Observation(step, step_ms=100.0))
    assert adaptation.choose(20, slow)[2] == pytest.approx(expected)


def test_it_is_measured_when_steps_get_slow() -> None:
    adaptation = Adaptation(section(probe_every=50))
    adaptation.choose(100, seen(1e9))
    for step in range(103, 120):
        adaptation.observe(Observation(step, step_ms=100.0))
        assert not adaptation.due(step)
    for step in range(120, 123):
        assert not adaptation.due(step)
        adaptation.observe(Observation(step, step_ms=160.0))
    assert adaptation.due(122)
    adaptation.choose(123, seen(1e9))
    assert not adaptation.due(124)


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
    assert adaptive(max_error=1.0).choose(Choice((1,)), found, STEP).choice.gradients == (0,)


def test_gradients_of_zero_and_ranks_that_send_nothing_choose_the_gentlest() -> None:
    nothing = Measurement(((0.0,),) * 4, (0.0,), ((0.0,),) * 4, CODEC, AlphaBeta(0.0, 0.0), 0.0, 0.0)
    assert adaptive().choose(Choice((2,)), nothing, STEP).choice.gradients in {(0,), (1,), (2,), (3,)}
    lossy = replace(nothing, norms=(1.0,), errors=tuple((error,) for error in ERRORS))
    assert brief(adaptive().settings(adaptive().choose(Choice((0,)), lossy, STEP).choice.gradients)) == "none"


def test_what_a_candidate_does_not_send_costs_no_encoding_in_its_group_alone() -> None:
    """Candidate 3 sends nothing at all, and 0 of the second group alone."""
    found = replace(seen(1e8, groups=2), sizes=((0.0, 1.0), (0.0, 4.0), (0.0, 1.0), (0.0, 0.0)))
    assert found.seconds(Choice((3, 0)), room=0.0) == pytest.approx(CODEC[0], rel=1e-3)


def loaded(saved: dict[str, Any], **settings: Any) -> Adaptation:
    found = Adaptation(section(**settings))
    found.load(json.loads(json.dumps(saved)))
    return found


def chosen(*candidates: int, **settings: Any) -> dict[str, Any]:
    found = Adaptation(section(**settings))
    found._choice = Choice(candidates)
    return found.saved()


def test_a_saved_choice_is_a_setting_whatever_the_order_of_candidates_is() -> None:
    two_bits = chosen(3)
    assert brief(loaded(two_bits).settings) == "blockwise bits=2"
    assert brief(loaded(two_bits, candidates=[{"bits": 2}, {"method": "sign"}]).settings) == "blockwise bits=2"
    assert loaded(two_bits).saved() == two_bits


def test_a_saved_choice_belongs_to_a_pattern_whatever_the_order_of_groups_is() -> None:
    saved = chosen(3, 2, 0, groups=["embed", "head"])
    found = loaded(saved, groups=["head", "embed"])
    assert found._choice == Choice((2, 3, 0))


def test_of_equal_patterns_the_first_is_saved() -> None:
    assert loaded(chosen(3, 2, 0, groups=["embed", "."]), groups=["embed", "."])._choice.gradients[:2] == (3, 2)


@pytest.mark.parametrize("settings", [{"candidates": [{"bits": 4}]}, {"groups": ["embed"]}])
def test_a_choice_that_is_no_candidate_any_more_gives_way_to_what_is_written(settings: dict[str, Any]) -> None:
    saved = chosen(3)
    with pytest.warns(CompressWarning, match="checkpoint's choice is no longer among the candidates"):
        found = loaded({**saved, "next": 90, "last": 40}, **settings)
    assert (
        brief(found.adaptive.settings((found._choice.gradients[0],) * len(found._choice.gradients)))
        == "blockwise bits=8"
    )
    assert found.due(48)


def test_places_of_a_state_of_before_mean_nothing() -> None:
    with pytest.warns(CompressWarning, match="until the next measurement"):
        found = loaded({**chosen(3), "choice": [3]})
    assert brief(found.settings) == "blockwise bits=8"


def test_an_empty_segment_has_no_sample() -> None:
    prober = Prober(adaptive(), Parameters({"a": (0,), "b": (8,)}, ["a", "b"]), torch.device("cpu"))
    segments = (Segment("a", 0, 0, 0, 0), Segment("b", 0, 8, 0, 1))
    prober.see(torch.ones(8), Partition(segments, 2), 0, everywhere=False)
    assert [piece.numel() for piece in prober._samples[0].pieces] == [8]


@pytest.mark.parametrize(
    ("measured", "believed"),
    [
        # A link that had saved up; one that is faster; one that is slower; one about as fast.
        ([100, 200, 110, 100], [100, 110, 100]),
        ([100, 200, 190, 200], [100, 190, 200]),
        ([100, 20, 25], [100, 20, 25]),
        ([100, 140, 100], [100, 140, 100]),
    ],
)
def test_a_faster_link_is_believed_at_the_second_try(
    monkeypatch: pytest.MonkeyPatch, measured: list[float], believed: list[float]
) -> None:
    prober = Prober(adaptive(), Parameters({"a": (8,)}, ["a"]), torch.device("cpu"))
    links = iter(AlphaBeta(0.0, 1 / rate) for rate in measured)
    monkeypatch.setattr(prober, "_probe", lambda group: next(links))
    assert [prober._link(None).bandwidth for _ in believed] == pytest.approx(believed)
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
        '(allowed: all methods except "demo", "dgc")',
    ),
    (
        {"adaptive": {"candidates": [{"method": "qsgd"}]}},
        "/candidates/0/method",
        "must both keep residuals or both keep none",
    ),
    (
        {"gradients": {"hierarchy": {"ranks_per_node": 2}}, "adaptive": {"candidates": [POWERSGD]}},
        "/candidates/0/method",
        "reduces among all ranks at once",
    ),
    (
        {"gradients": {"error_feedback": None}, "adaptive": {"candidates": [POWERSGD]}},
        "/candidates/0/method",
        "only measured with it",
    ),
    ({"gradients": {**POWERSGD, "error_feedback": None}, "adaptive": {}}, "/error_feedback", "only measured with it"),
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
def test_what_cannot_adapt_is_refused(raw: dict[str, Any], place: str, words: str) -> None:
    [problem] = find_problems({SECTION: raw})
    assert problem.pointer.endswith(place)
    assert words in problem.message
