"""Candidates for gradients and weights, which are chosen together: the defaults, their penalties, and saved choices."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_compress.config import SECTION, brief, parse_section
from deepspeed_compress.config.candidates import gradient_candidates, weight_candidates
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.decider import StepPlan
from deepspeed_compress.policy.measurement import AlphaBeta, Choice, Measurement, WeightCosts
from deepspeed_compress.policy.policy import Policy
from deepspeed_compress.policy.selector import CandidateSelector, penalty, weights_penalty

SIGN = {"method": "sign"}
THREE = {"method": "sign", "levels": 3}
WEIGHTS = [{"method": "none"}, {"bits": 8}, THREE, {"method": "sign"}]
"""Candidates 1 to 4. Candidate 0 is the configured setting (4 bits)."""
WEIGHT_COSTS = WeightCosts((5e6, 40e6, 10e6, 2e6, 1.5e6), (0.01, 0.0, 0.01, 0.01, 0.01))


def section(gradients: Any = None, written: Any = None, **adaptive: Any) -> Any:
    raw = {"gradients": gradients or {"bits": 4}, "weights": written or {"bits": 4}, "adaptive": adaptive}
    return parse_section({SECTION: raw})


def adaptive(**settings: Any) -> CandidateSelector:
    return CandidateSelector(section(candidates=[SIGN], weights=WEIGHTS, **settings), differences=True)


def measured(rate: float, waited: float = 1e9, groups: int = 1) -> Measurement:
    """Return a measurement of 4 bits, none and signs on a link of `rate` bytes per second.

    By default, no message is hidden.
    """
    share = 1 / groups
    return Measurement(
        errors=tuple((error * share,) * groups for error in (0.02, 0.0, 0.25)),
        norms=(share,) * groups,
        sizes=tuple((size * share,) * groups for size in (5e6, 40e6, 0.7e6)),
        codec_seconds=(0.01, 0.0, 0.03),
        link=AlphaBeta(1e-4, 1 / rate),
        waited=waited,
        step=2.0,
        weights=WEIGHT_COSTS,
    )


def names(found: Any) -> list[str]:
    return [brief(one) for one in found]


def test_the_default_candidates_are_the_common_methods() -> None:
    found = names(gradient_candidates(section()))
    assert found[:2] == ["blockwise bits=4", "none"]
    assert {f"blockwise bits={bits}" for bits in (8, 4, 3, 2)} | {"sign"} < set(found)
    assert len(found) == len(set(found))
    assert names(weight_candidates(section(), differences=True)) == [
        "blockwise bits=4",
        "none",
        "blockwise bits=8",
        "blockwise bits=3",
        "sign levels=3",
        "sign",
    ]


def test_weights_are_chosen_only_if_they_are_sent_as_compressed_differences() -> None:
    assert names(weight_candidates(section(), differences=False)) == ["blockwise bits=4"]
    assert names(weight_candidates(section(written={"method": "none"}), differences=True)) == ["none"]
    assert names(weight_candidates(section(written={"method": "topk"}), differences=True)) == ["topk density=0.01"]
    assert names(weight_candidates(section(weights=[{}]), differences=True)) == ["blockwise bits=4"]


def test_candidates_for_weights_keep_the_common_keys() -> None:
    found = weight_candidates(section(written={"bits": 4, "min_numel": 9, "overlap": True}), differences=True)
    assert {one.min_numel for one in found if one.method != "none"} == {9}
    assert all(one.overlap for one in found if one.method != "none")


def test_weights_are_chosen_even_if_gradients_have_one_candidate() -> None:
    found = section({"method": "demo"}, {"method": "sign"})
    assert names(gradient_candidates(found)) == ["demo density=0.01 values=blockwise bits=4"]
    assert len(weight_candidates(found, differences=True)) > 3


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        ({"weights": {"bits": 8}, "adaptive": {"weights": [{"bits": 4}]}}, "/adaptive/weights"),
        ({"weights": {"bits": 8}, "gradients": {"method": "dgc"}, "adaptive": {}}, "/adaptive"),
    ],
)
def test_weights_cannot_be_chosen_under_zero_3(raw: dict[str, Any], place: str) -> None:
    def problems(stage: int) -> list[str]:
        return [problem.pointer for problem in find_problems({"zero_optimization": {"stage": stage}, SECTION: raw})]

    assert problems(1) == problems(2) == []
    assert problems(3) == [f"/{SECTION}{place}"]


def test_the_penalty_of_weights_matches_the_measurements() -> None:
    by_name = {
        brief(weight_candidate): weight_candidate for weight_candidate in weight_candidates(section(), differences=True)
    }
    assert [weights_penalty(by_name[f"blockwise bits={bits}"], 100) for bits in (8, 4)] == [1.0, 1.0]
    assert weights_penalty(by_name["none"], 1) == 1.0
    assert weights_penalty(by_name["sign levels=3"], 300) == pytest.approx(1.17)
    assert weights_penalty(by_name["sign"], 300) == pytest.approx(1.22)
    assert weights_penalty(by_name["sign"], 80) == pytest.approx(1.4)
    assert 1.0 < weights_penalty(by_name["blockwise bits=3"], 300) < 1.17
    for one in by_name.values():
        steps = [weights_penalty(one, step) for step in (0, 150, 300, 400, 500, 10**6)]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("rate", "step", "gradients", "weights"),
    [
        (100e9 / 8, 300, "none", "none"),
        (1e9 / 8, 300, "blockwise bits=4", "blockwise bits=4"),
        (1e8 / 8, 300, "sign", "sign"),
        (4e8 / 8, 2, "blockwise bits=4", "blockwise bits=4"),
        (4e8 / 8, 900, "blockwise bits=4", "sign levels=3"),
        (1e7 / 8, 500, "sign", "sign"),
    ],
)
def test_gradients_and_weights_are_chosen_together(rate: float, step: int, gradients: str, weights: str) -> None:
    """A slower link and a later step lead to fewer bytes of both."""
    found, seen, now = adaptive(margin=0.0), measured(rate), Choice((0,))
    choice = found.choose(now, replace(seen, step=0.3 + seen.seconds(now, hidden=0.0)), step).choice
    assert brief(found.settings(choice.gradients)) == gradients
    assert brief(found.weights[choice.weights]) == weights


def test_the_choice_is_the_best_of_all_pairs() -> None:
    found, seen = adaptive(margin=0.0), measured(3e7)
    chosen = found.choose(Choice((0,)), seen, 300)
    pairs = [Choice((one,), weight) for one in range(3) for weight in range(5)]
    times = {
        pair: penalty(seen.error(pair.gradients), 300)
        * weights_penalty(found.weights[pair.weights], 300)
        * seen.step_seconds(pair, Choice((0,)), 0.0)
        for pair in pairs
    }
    assert times[chosen.choice] <= 1.01 * min(times.values())
    evidence = chosen.evidence
    product = evidence["penalty"] * evidence["weights_penalty"] * evidence["step_seconds"]
    assert evidence["predicted"] == pytest.approx(product) == pytest.approx(times[chosen.choice])


def test_weights_are_hidden_if_they_are_sent_during_the_forward_pass() -> None:
    seen = measured(1e8 / 8)
    overlapped = replace(seen, weights=replace(WEIGHT_COSTS, overlap=True))
    assert seen.seconds(Choice((2,)), hidden=1.0) == pytest.approx(overlapped.seconds(Choice((2,)), hidden=1.0) + 0.4)


def test_the_hidden_time_is_that_of_the_messages_that_did_not_wait() -> None:
    seen = replace(measured(1e8 / 8, waited=0.1), weights=WeightCosts())
    assert seen.hidden_seconds(Choice((0,)), 0.0) == pytest.approx(0.4 - 0.1)
    # All messages are hidden, so a step hides at least their time.
    assert replace(seen, waited=0.02).hidden_seconds(Choice((0,)), 0.0) == pytest.approx(0.4)
    assert replace(seen, waited=0.02).hidden_seconds(Choice((0,)), 0.7) == 0.7
    # A new measurement finds less.
    assert seen.hidden_seconds(Choice((0,)), 0.7) == pytest.approx(0.3)


@pytest.mark.parametrize("rate", [1e7 / 8, 1e8 / 8, 1e9 / 8, 1e10 / 8])
@pytest.mark.parametrize("step", [2, 90, 300, 800])
def test_the_choice_does_not_depend_on_the_present_choice(rate: float, step: int) -> None:
    """Step times follow the model: one second of computation plus the time that messages add."""
    found, hidden = adaptive(margin=0.0), 0.2
    chosen = set()
    for now in (Choice((one,), weight) for one in range(3) for weight in range(5)):
        seen = measured(rate)
        hideable, _ = seen._message_seconds(now)
        left = max(0.0, hideable - hidden)
        late = seen.seconds(now, hidden) - seen._codec(now) - left
        seen = replace(seen, step=1.0 + seen.seconds(now, hidden), waited=late + left)
        chosen.add(found.choose(now, seen, step, hidden).choice)
    assert len(chosen) == 1


def test_a_candidate_with_an_unknown_error_is_not_chosen() -> None:
    seen = replace(measured(1e7 / 8), errors=((0.02,), (0.0,), (math.nan,)))
    assert adaptive().choose(Choice((0,)), seen, 900).choice.gradients != (2,)


def test_a_single_rank_uses_no_compression() -> None:
    nothing = replace(measured(1e9), sizes=((0.0,),) * 3, weights=WeightCosts((0.0,) * 5, (0.0,) * 5))
    alone = replace(nothing, codec_seconds=(0.0,) * 3, link=AlphaBeta(0.0, 0.0), waited=0.0)
    choice = adaptive().choose(Choice((0,)), alone, 2).choice
    assert choice.gradients == (1,)
    assert weights_penalty(adaptive().weights[choice.weights], 2) == 1.0


def adaptation(**settings: Any) -> Adaptation:
    return Adaptation(section(**{"candidates": [SIGN], "weights": WEIGHTS, **settings}), [].append, differences=True)


def text_of(adaptation: Adaptation) -> str:
    plan = adaptation.plan(9, StepPlan(section().gradients, section().weights))
    return f"{plan.text}, weights {brief(plan.weights)}"


def through_json(saved: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(saved))
    return found


def test_a_choice_survives_a_resume() -> None:
    first = adaptation()
    for step, rate in ((2, 1e8 / 8), (11, 3.3e6)):
        first.choose(step, measured(rate, waited=0.123))
    second = adaptation(candidates=[{"bits": 2}, SIGN], weights=WEIGHTS[::-1])
    second.load(through_json(first.saved()))
    assert second.saved() == first.saved()
    assert text_of(second) == text_of(first)
    again, seen = adaptation(), measured(1e8 / 8, waited=0.3)
    again.load(through_json(first.saved()))
    again.choose(300, seen)
    first.choose(300, seen)
    assert again.saved() == first.saved()


def test_saved_weights_that_are_no_longer_a_candidate_are_replaced_by_the_configured_settings() -> None:
    first = adaptation()
    first._choice = Choice((2,), 3)
    second = adaptation(weights=[{"bits": 8}])
    with pytest.warns(CompressWarning, match="among the candidates"):
        second.load({"adaptation": {**through_json(first.saved())["adaptation"], "next": 90, "last": 40}})
    assert text_of(second) == "sign, weights blockwise bits=4"
    assert second.plan(48, StepPlan(section().gradients, section().weights)).probe


def test_plans_and_events_contain_gradients_and_weights() -> None:
    events: list[Any] = []
    found = Policy(section(candidates=[SIGN], weights=WEIGHTS), None, events.append, differences=True)
    assert (brief(found.begin(0).weights), found.begin(0).changed) == ("blockwise bits=4", False)
    assert found.begin(1).probe
    assert found.adaptation is not None
    found.adaptation.choose(2, replace(measured(3e5), step=34.0))
    plan = found.begin(2)
    assert (plan.text, brief(plan.weights), plan.changed) == ("sign", "sign levels=3", True)
    assert not found.begin(3).changed
    [event] = events
    assert (event.before, event.after) == (
        "blockwise bits=4, weights blockwise bits=4",
        "sign, weights sign levels=3",
    )
    resumed = Policy(section(candidates=[SIGN], weights=WEIGHTS), None, events.append, differences=True)
    resumed.load(through_json(found.saved()))
    # Resuming is not a change of settings, which would convert the residuals again.
    assert resumed.begin(3) == found.begin(3)
    assert not resumed.begin(4).changed
