"""Each rule on both sides of its threshold, with made-up figures of an otherwise healthy run."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.doctor import case
from deepspeed_compress.tools.doctor.case import Case, Run
from deepspeed_compress.tools.doctor.patches import apply, difference
from deepspeed_compress.tools.doctor.rules import RULES
from deepspeed_compress.tools.doctor.rules.learning import risen
from tests.support.synthetic_runs import CONFIG, config, examine, losses, names, run

TOPK = {"method": "topk", "density": 0.01}
SLOW = {"compress_ms": 30.0, "decompress_ms": 9.0}
STOCHASTIC = {"bits": 4, "rounding": "stochastic"}
ZERO_3 = {"zero_optimization": {"stage": 3}}
GATHERING = {"bytes_weights": 400_000_000}
NO_OVERLAP = {"zero_optimization": {"stage": 2, "overlap_comm": False}}


def events(count: int, every: int, reason: str = "gradient norm 9 is 30 times the running median") -> tuple[Any, ...]:
    one = {"kind": "anomaly", "reason": reason, "evidence": {}, "before": "", "after": "none", "dry_run": False}
    return tuple({"step": 3 + index * every, **one} for index in range(count))


ELASTIC = {"rendezvous": "head:29400"}
ISLANDS = {"sync_every": 4, "elastic": ELASTIC}
MOMENTUM = {**ISLANDS, "outer": {"optimizer": "nesterov", "lr": 0.7}}
OVERSHOOT = {**ISLANDS, "outer": {"lr": 2.0}}
PUSHING = {"sync_every": 4, "elastic": {**ELASTIC, "parameter_server": {}}}


def exchanging(cosine: float, every: int = 4) -> Callable[[int], dict[str, Any]]:
    """Return changes for the steps that follow an exchange: traffic of islands, and their cosine."""
    return lambda step: (
        {"bytes_islands": 10_000, "islands_cosine": cosine} if step > 1 and (step - 1) % every == 0 else {}
    )


def sawtooth(rise: float) -> Callable[[int], float]:
    """Return losses near 3 that fall for four steps and rise at each exchange between islands."""
    return lambda step: 3 + rise * (1 - ((step - 1) % 4) / 3)


def climbing(step: int) -> float:
    """Return a loss that rises more at exchanges than it falls between them."""
    return sawtooth(0.4)(step) + max(0, step - 20) // 4 * 0.3


def late(count: int, kind: str = "islands_left_out") -> tuple[Any, ...]:
    one = {"kind": kind, "reason": "too late for a round", "evidence": {}, "before": "", "after": "", "dry_run": False}
    return tuple({"step": 4 * index, **one} for index in range(1, count + 1))


def versions(lag: float) -> tuple[Any, ...]:
    """Return lines of 40 versions, of which the first has a full copy."""
    return tuple(
        {
            "step": step,
            "rollout_version": step + 1,
            "rollout_bytes": 1_000_000,
            "rollout_full_bytes": 0 if step else 20_000_000,
            "rollout_age_ms": 500.0 if step else None,
            "rollout_lag": lag,
        }
        for step in range(40)
    )


def publishing(**settings: Any) -> dict[str, Any]:
    return config(rollout={"directory": "/shared", **settings})


def rising(step: int) -> float:
    return 10 - step / 4 if step <= 24 else 4 + (step - 24) / 2


FAULTY: dict[str, list[tuple[Run, Any]]] = {
    "compression-too-strong": [
        (run({"residual_norm": 20.0}, config(TOPK)), {"density": 0.1}),
        (run(lambda step: {"residual_norm": step / 10, "grad_norm": None}, config(TOPK)), {"density": 0.1}),
        (run({"cosine": 0.19}, config({"method": "sign"})), {"method": "blockwise", "bits": 4}),
        (run({}, config({**TOPK, "error_feedback": None})), {"density": 0.1, "error_feedback": {}}),
    ],
    "diverging": [
        (run(losses=losses(lambda step: math.nan if step > 30 else 3.0 - step / 50)), None),
        (run(losses=losses(lambda step: math.nan)), None),
        (run(losses=losses(rising)), None),
    ],
    "guard-fires-often": [
        (run(events=events(3, 12)), {"bits": 8}),
        (run(events=events(3, 12), ds_config=config(guard={"exploding": 3.0})), None),
        (run({"settings": "none"}, events=events(3, 1), steps=400), {"bits": 8}),
    ],
    "skipped-steps": [
        (run(events=events(7, 9, "grad_norm not finite"), steps=100), None),
        (run(lambda step: {"grad_norm": None if step > 20 and step % 10 == 0 else 1.0}, steps=100), None),
    ],
    "communication-bound": [
        (run({"communicate_ms": 63.0, "busy_ms": 187.0}, config({"bits": 8})), {"bits": 4}),
        (run({"communicate_ms": 63.0}, config({"method": "bf16"})), {"method": "blockwise"}),
    ],
    "slow-kernels": [(run({"compress_ms": 54.0}), None)],
    "compression-bound": [
        (run({**SLOW, "bytes_uncompressed": 84_000_000}, config(STOCHASTIC)), {"rounding": "nearest"}),
        (run(SLOW, config(TOPK)), {"density": None, "method": "blockwise", "bits": 4}),
    ],
    "compression-does-not-pay": [
        (
            run(
                {"communicate_ms": 0.5, "compress_ms": 12.0, "decompress_ms": 9.0},
                config(extra=NO_OVERLAP, weights=None),
            ),
            {"bits": None, "method": "none"},
        )
    ],
    "straggler": [(run({"busy_ms_median": 200.0, "busy_ms_max": 226.0, "slowest_rank": 3}), None)],
    "nothing-compressed": [
        (run({"bytes_raw": 2_430_000}, config({"bits": 4, "min_numel": 10**6})), {"min_numel": None}),
        (
            run({"bytes_raw": 2_700_000}, config({"overrides": [{"parameters": "w", "method": "none"}]})),
            {"overrides": None},
        ),
    ],
    "weights-uncompressed": [(run({"bytes_weights": 21_000_000}, config(weights=None)), None)],
    "frozen-weights-gathered": [(run(GATHERING, config(extra=ZERO_3)), None)],
    "islands-drift-apart": [(run(exchanging(0.04), config(islands=ISLANDS)), None)],
    "sync-every-too-long": [
        (run(exchanging(0.5), config(islands=ISLANDS), losses=losses(sawtooth(0.4))), None),
        (run(exchanging(0.5), config(islands=MOMENTUM), losses=losses(sawtooth(0.4))), None),
        (run(exchanging(0.5), config(islands=MOMENTUM), losses=losses(climbing)), None),
    ],
    "late-island": [
        (run(exchanging(0.5, every=20), config(islands=ISLANDS), events=late(3)), None),
        (run(exchanging(0.5, every=20), config(islands=PUSHING), events=late(3, "islands_renewed")), None),
    ],
    "old-rollouts": [
        (run(ds_config=publishing(), versions=versions(8.1)), None),
        (run(ds_config=publishing(max_lag=0), versions=versions(0.5)), None),
    ],
}
"""By rule: runs that it must report, each with the gradient settings of its patch, or None."""

NEAR: dict[str, list[Run]] = {
    "compression-too-strong": [
        run({"residual_norm": 19.9}, config(TOPK)),
        run(
            {"residual_norm": 40.0},
            config({**TOPK, "overrides": [{"parameters": "wte", "method": "none", "every": 20}]}),
        ),
        run(lambda step: {"residual_norm": math.sqrt(step), "grad_norm": None}, config(TOPK)),
        run(lambda step: {"residual_norm": step / 10, "grad_norm": step / 5}, config(TOPK)),
        run({"cosine": 0.21}, config({"method": "sign"})),
        run({"residual_norm": 90.0, "cosine": 0.1}, config({"method": "demo"}, {"optimizer": {"type": "SGD"}})),
    ],
    "diverging": [
        run(losses=losses(lambda step: 3 + (step % 2))),
        run(losses=losses(lambda step: 9.0 if step == 20 else 3 - step / 40)),
        run(losses=losses(lambda step: math.nan if step == 20 else 3 - step / 40)),
    ],
    "guard-fires-often": [
        run(events=events(2, 1)),
        run(events=events(3, 60), steps=400),
        # Nothing is compressed in dense steps, so compression cannot be at fault.
        run(events=events(5, 2), ds_config=config(schedule={"warmup_steps": 9})),
    ],
    "skipped-steps": [
        # A loss that is not finite is known only after the next step, which is not skipped.
        run(events=(*events(2, 50, "grad_norm not finite"), *events(7, 9, "loss not finite")), steps=100),
        run(events=events(4, 4, "grad_norm not finite"), steps=100),
        run(events=events(2, 19, "grad_norm not finite")),
    ],
    "communication-bound": [run({"communicate_ms": 62.0})],
    "slow-kernels": [
        run({"compress_ms": 51.0}),
        run({"compress_ms": 50.0}, config(TOPK)),
        run({"compress_ms": 50.0, "bytes_uncompressed": 3_900_000}),
    ],
    "compression-bound": [run({"compress_ms": 20.0, "decompress_ms": 17.0}, config(TOPK))],
    "compression-does-not-pay": [
        run({"communicate_ms": 0.5, "compress_ms": 12.0, "decompress_ms": 9.0}),
        run(
            {"communicate_ms": 0.5, "compress_ms": 12.0, "decompress_ms": 9.0},
            config(extra={"zero_optimization": {"stage": 3, "overlap_comm": False}}, weights=None),
        ),
        run({"communicate_ms": 5.0, "compress_ms": 12.0, "decompress_ms": 9.0}, config(extra=NO_OVERLAP, weights=None)),
    ],
    "straggler": [
        run({"busy_ms_median": 200.0, "busy_ms_max": 224.0}),
        run(lambda step: {"busy_ms_median": 200.0, "busy_ms_max": 230.0, "slowest_rank": step % 2}),
    ],
    "nothing-compressed": [run({"bytes_raw": 2_400_000})],
    "weights-uncompressed": [
        run({"bytes_weights": 5_000_000}, config(weights=None)),
        run({"bytes_weights": 21_000_000}),
        run(GATHERING, config(extra=ZERO_3, weights=None)),
    ],
    "frozen-weights-gathered": [
        run(GATHERING),
        run({"bytes_weights": 330_000_000}, config(extra=ZERO_3)),
        run(GATHERING, config(extra=ZERO_3, parallelism={"shard_within": "node"})),
    ],
    "islands-drift-apart": [
        run(exchanging(0.06), config(islands=ISLANDS)),
        # The rule uses only the later half of the run.
        run(lambda step: exchanging(0.0 if step < 20 else 0.3)(step), config(islands=ISLANDS)),
    ],
    "sync-every-too-long": [
        run(exchanging(0.5), config(islands=ISLANDS), losses=losses(sawtooth(0.1))),
        # The loss rises as much between exchanges.
        run(exchanging(0.5, every=5), config(islands=ISLANDS), losses=losses(sawtooth(0.4))),
    ],
    "late-island": [
        run(exchanging(0.5, every=20), config(islands=ISLANDS), events=late(2)),
        run(exchanging(0.5), config(islands=ISLANDS), events=late(8)),
    ],
    "old-rollouts": [
        run(ds_config=publishing(), versions=versions(8.0)),
        run(ds_config=publishing(max_lag=1), versions=versions(1.0)),
    ],
}
"""By rule: runs that stay just below its threshold."""

FOUND = [
    pytest.param(rule, *pair, id=f"{rule}-{index}")
    for rule, pairs in FAULTY.items()
    for index, pair in enumerate(pairs)
]


@pytest.mark.parametrize(("rule", "found", "gradients"), FOUND)
def test_rule_reports_its_fault_with_a_valid_and_exact_patch(
    rule: str, found: Run, gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, "difference", exact_difference)
    diagnosis = examine(found)
    assert [diagnostic.name for diagnostic in diagnosis.diagnostics][:1] == [rule]
    patch = diagnosis.diagnostics[0].patch or {}
    assert patch.get("deepspeed_compress", {}).get("gradients") == gradients
    for one in diagnosis.diagnostics:
        assert one.patch is None or find_problems(apply(found.config, one.patch)) == []


def exact_difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `difference(old, new)` after checking that it is not empty and yields `new`."""
    patch = difference(old, new)
    assert patch
    assert apply(old, patch) == new
    return patch


@pytest.mark.parametrize(
    ("rule", "found"),
    [pytest.param(rule, one, id=f"{rule}-{index}") for rule, runs in NEAR.items() for index, one in enumerate(runs)],
)
def test_rule_is_silent_just_below_its_threshold(rule: str, found: Run) -> None:
    diagnosis = examine(found)
    assert rule in [checked.name for checked in diagnosis.checked]
    assert rule not in [diagnostic.name for diagnostic in diagnosis.diagnostics]


def test_every_rule_is_tested_on_both_sides() -> None:
    assert list(FAULTY) == [rule.name for rule in RULES] == list(NEAR)


def test_healthy_run_has_no_findings_and_every_rule_is_checked() -> None:
    diagnosis = examine(run())
    assert diagnosis.diagnostics == ()
    assert diagnosis.unchecked == ()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_without_its_data_is_unchecked(rule: Any) -> None:
    bare = Run(run().directory, tuple({"step": step, "method": "none"} for step in range(1, 41)))
    unchecked = {one.name: needs for one, needs in examine(bare).unchecked}
    assert unchecked[rule.name]


def test_severity_grows_with_the_loss_above_the_baseline() -> None:
    better = run(losses=losses(lambda step: 2 + 7.0 / step))
    slightly = run(losses=losses(lambda step: 1.02 * (2 + 7.0 / step)))
    much = run(losses=losses(lambda step: 1.06 * (2 + 7.0 / step)))
    assert names(better, better) == []
    assert examine(slightly, better).diagnostics[0].severity == "warning"
    assert examine(much, better).diagnostics[0].severity == "error"
    assert names(slightly, better) == ["compression-too-strong"]


def test_alternating_stragglers_are_not_reported_as_a_slow_network() -> None:
    """Figures about other ranks describe the previous measured step; the first step has none."""

    def turns(step: int) -> dict[str, Any]:
        waits = {"communicate_ms": 150.0, "busy_ms": 100.0} if step % 2 else {"communicate_ms": 10.0, "busy_ms": 240.0}
        others = {"busy_ms_median": 170.0, "busy_ms_max": 240.0} if step > 1 else dict.fromkeys(OTHERS)
        return {**waits, **others}

    assert names(run(turns)) == []


OTHERS = ("busy_ms_median", "busy_ms_max", "slowest_rank")


@pytest.mark.parametrize(
    ("section", "islands"),
    [(ISLANDS, {"sync_every": 2}), (MOMENTUM, {"outer": {"lr": 0.35}}), (OVERSHOOT, {"outer": {"lr": 1.0}})],
)
@pytest.mark.parametrize(("course", "severity"), [(sawtooth(0.4), "warning"), (climbing, "error")])
def test_patch_for_drifting_islands(section: Any, islands: Any, course: Any, severity: str) -> None:
    """This also holds if the loss keeps rising: the optimizer's learning rate is not the cause."""
    [one] = examine(run(exchanging(0.5), config(islands=section), losses=losses(course))).diagnostics
    assert (one.name, one.severity) == ("sync-every-too-long", severity)
    assert one.patch == {"deepspeed_compress": {"islands": islands}}


def test_remedy_for_a_slow_network_depends_on_the_configuration() -> None:
    slow = {"communicate_ms": 90.0}
    often = run(slow, config(extra={"gradient_accumulation_steps": 4}))
    assert examine(often).diagnostics[0].patch == {"zero_optimization": {"stage": 1}}
    once = run(slow, config(extra={"zero_optimization": {"stage": 1}, "train_batch_size": 8}))
    assert examine(once).diagnostics[0].patch == {"train_batch_size": 16, "gradient_accumulation_steps": 2}
    small = run({**slow, "bytes_sent": 200_000, "bytes_weights": 200_000})
    assert "latency" in examine(small).diagnostics[0].remedy


def test_a_patch_that_would_be_invalid_is_replaced_by_the_reason() -> None:
    found = replace(run(losses=losses(rising)), config=config({"method": "blockwise", "bits": 99}))
    one = examine(found).diagnostics[0]
    assert (one.name, one.patch) == ("diverging", None)
    assert "There is no patch, because the patched configuration would be invalid: " in one.remedy
    assert "/gradients/bits" in one.remedy


def test_run_slower_than_its_baseline_is_reported() -> None:
    slow = run({"step_ms": 280.0, "communicate_ms": 40.0})
    dense = run({"method": "none", "step_ms": 240.0}, config({"method": "none"}, weights=None))
    assert names(slow, dense) == ["compression-does-not-pay"]
    assert names(run({"step_ms": 260.0, "communicate_ms": 40.0}), dense) == []


def test_the_rise_of_a_long_run_is_found_at_once() -> None:
    """A run of 100,000 steps has windows of 10,000 losses, which begin at every 500th step."""
    points = tuple((step, 10 - step / 10_000 if step <= 60_000 else step / 15_000) for step in range(1, 100_001))
    begin = time.process_time()
    found = risen(Case(replace(run(), losses=points)))
    assert time.process_time() - begin < 3
    assert found is not None
    assert 60_000 < found[0] < 80_000
    assert abs(found[2]["at step"] - 66_000) < 1_000


def test_straggler_is_no_slow_network_although_the_first_step_lacks_figures_of_other_ranks() -> None:
    late = {"communicate_ms": 120.0, "busy_ms": 130.0, "busy_ms_median": 185.0, "busy_ms_max": 240.0, "slowest_rank": 1}
    assert names(run(late)) == ["straggler"]
    assert names(run(lambda step: {**late, **(dict.fromkeys(OTHERS) if step == 1 else {})})) == ["straggler"]


def test_nonfinite_loss_is_the_first_finding_despite_islands() -> None:
    ended = losses(lambda step: math.nan if step > 38 else climbing(step))
    found = names(run(exchanging(0.5), config(islands=MOMENTUM), losses=ended))
    assert found[0] == "diverging"


def test_divergence_lists_the_events_near_its_start() -> None:
    [one] = examine(run(losses=losses(rising), events=events(1, 1))).diagnostics
    assert one.evidence["events nearby"] == ["step 3: anomaly, gradient norm 9 is 30 times the running median"]
    assert 22 <= one.evidence["first symptom at step"] <= 32
    assert one.patch == {"optimizer": {"params": {"lr": 0.0005}}}


def test_a_loss_of_zero_may_rise_at_exchanges() -> None:
    rising_at_exchanges = losses(lambda step: float((step - 1) % 4 == 0))
    found = run(exchanging(0.5), config(islands=ISLANDS), losses=rising_at_exchanges)
    assert "sync-every-too-long" in names(found)


def test_a_section_of_another_version_gets_no_patch() -> None:
    old = {**CONFIG, SECTION: {"gradients": {"method": "of another version"}}}
    found = replace(run(SLOW), config=old, section=None)
    assert [one.patch for one in examine(found).diagnostics if one.name == "compression-bound"] == [None]
