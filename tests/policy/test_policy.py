"""The schedule, the ladder and the guard, as functions of the step and the observations."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from deepspeed_compress.config import SECTION, brief, parse_section, total_steps
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.decider import Observation, StepPlan
from deepspeed_compress.policy.guard import Guard, ladder
from deepspeed_compress.policy.policy import Policy
from deepspeed_compress.policy.schedule import SettingsSchedule, timeline

TOPK = {"method": "topk", "density": 0.01}


def config(**section: Any) -> Any:
    return parse_section({SECTION: section})


def stages(total: int | None = None, **section: Any) -> list[tuple[int, str]]:
    return [(step, brief(settings)) for step, settings, _ in timeline(SettingsSchedule(config(**section), total))]


def test_without_a_schedule_nothing_changes() -> None:
    assert stages(gradients=TOPK) == [(0, "topk density=0.01")]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_only_the_warmup_steps_are_dense(steps: int) -> None:
    scheduled = SettingsSchedule(config(schedule={"warmup_steps": steps}))
    assert [scheduled.at(step).method == "none" for step in range(8)] == [True] * steps + [False] * (8 - steps)


@pytest.mark.parametrize(
    ("shape", "half"), [("linear", (0.25 + 0.01) / 2), ("exponential", 0.05), ("cosine", (0.25 + 0.01) / 2)]
)
def test_a_ramp_falls_from_its_start_to_the_chosen_density(shape: str, half: float) -> None:
    scheduled = SettingsSchedule(
        config(gradients=TOPK, schedule={"warmup_steps": 10, "ramp": {"steps": 160, "shape": shape}})
    )
    densities = [scheduled.at(step).density for step in range(10, 180)]
    assert densities[0] == 0.25
    assert densities[80] == pytest.approx(half)
    assert densities[159] > 0.01
    assert set(densities[160:]) == {0.01}
    assert densities == sorted(densities, reverse=True)
    assert len(set(densities)) == 17


def test_stages_of_a_ramp_have_equal_lengths() -> None:
    found = stages(gradients={"bits": 2}, schedule={"ramp": {"steps": 10, "stages": [{"bits": 8}, {"bits": 4}]}})
    assert found == [(0, "blockwise bits=8"), (5, "blockwise bits=4"), (10, "blockwise bits=2")]


def test_three_phases_have_default_ends() -> None:
    phases = [{"gradients": {"density": 0.1}}, {}, {"gradients": {"method": "blockwise", "bits": 4}}]
    found = stages(100, gradients=TOPK, schedule={"phases": phases, "total_steps": 100})
    assert found == [(0, "topk density=0.1"), (20, "topk density=0.01"), (80, "blockwise bits=4")]


def test_common_settings_stay_when_the_method_changes() -> None:
    chosen = {**TOPK, "min_numel": 7, "error_feedback": {"dtype": "fp32"}, "values": {"method": "bf16"}}
    phases = [{"until": 0.5}, {"gradients": {"method": "blockwise", "bits": 4}}]
    last = SettingsSchedule(config(gradients=chosen, schedule={"phases": phases, "total_steps": 10}), 10).at(9)
    assert (last.method, last.bits, last.min_numel, last.error_feedback.dtype) == ("blockwise", 4, 7, "fp32")


def test_the_number_of_steps_may_come_from_the_learning_rate_scheduler() -> None:
    ds_config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 300}}}
    assert total_steps(ds_config, config().schedule) == 300
    assert total_steps(ds_config, config(schedule={"total_steps": 5, "phases": [{}]}).schedule) == 5


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"schedule": {"phases": [{}]}}, "/schedule/total_steps", "not enough for phases"),
    ({"schedule": {"ramp": {"steps": 5}}}, "/schedule/ramp", "no density"),
    ({"gradients": {**TOPK, "density": 0.3}, "schedule": {"ramp": {"steps": 5}}}, "/schedule/ramp/start", "not above"),
    ({"schedule": {"phases": [{}, {}], "total_steps": 9}}, "/schedule/phases/0/until", "missing"),
    ({"schedule": {"phases": [{"until": 0.5}, {"until": 0.4}, {}], "total_steps": 9}}, "/phases/1/until", "not after"),
    ({"schedule": {"phases": [{"until": 0.5}], "total_steps": 9}}, "/phases/0/until", "leaves the rest"),
    ({"schedule": {"ramp": {"steps": 5, "stages": [{"bits": 5}]}}}, "/ramp/stages/0/bits", "5 is not accepted"),
    ({"schedule": {"ramp": {"steps": 5, "stages": [{"bitz": 8}]}}}, "/ramp/stages/0/bitz", "unknown key"),
    ({"schedule": {"ramp": {"steps": 5, "stages": [{"method": "demo"}]}}}, "/stages/0/method", "momentum"),
    ({"schedule": {"ramp": {"steps": 5, "stages": [{"error_feedback": None}]}}}, "/error_feedback", "created once"),
    (
        {"gradients": {"method": "none"}, "schedule": {"ramp": {"steps": 5, "stages": [{"method": "blockwise"}]}}},
        "/schedule/ramp/stages/0",
        "leaves reduction to DeepSpeed",
    ),
]


@pytest.mark.parametrize(("section", "place", "words"), WRONG)
def test_impossible_schedules_are_refused(section: dict[str, Any], place: str, words: str) -> None:
    [problem] = find_problems({SECTION: section})
    assert problem.pointer.endswith(place)
    assert words in problem.message


LADDERS = [
    ({"bits": 2}, ["blockwise bits=2", "blockwise bits=4", "blockwise bits=8", "none"]),
    (TOPK, ["topk density=0.01", "topk density=0.04", "topk density=0.16", "topk density=0.25", "none"]),
    ({"method": "sign"}, ["sign", "blockwise bits=4", "blockwise bits=8", "none"]),
    ({"method": "powersgd", "rank": 2}, ["powersgd rank=2", "powersgd rank=8", "powersgd rank=16", "none"]),
    ({"method": "qsgd"}, ["qsgd levels=7", "qsgd levels=127", "none"]),
    ({"method": "bf16"}, ["bf16", "none"]),
]


@pytest.mark.parametrize(("gradients", "rungs"), LADDERS)
def test_every_rung_of_the_ladder_is_softer(gradients: dict[str, Any], rungs: list[str]) -> None:
    assert [brief(settings) for settings in ladder(config(gradients=gradients).gradients)] == rungs


class Run:
    """A policy that observes one step after the other."""

    def __init__(self, gradients: dict[str, Any] | None = None, **guard: Any) -> None:
        self.events: list[Event] = []
        self.config = config(gradients=gradients or {"bits": 4}, guard={"window": 8, **guard})
        self.policy = Policy(self.config, None, self.events.append)
        self.step = 0
        self.plan = self.policy.begin(0)

    @property
    def guard(self) -> Guard:
        assert self.policy.guard is not None
        return self.policy.guard

    def observe(self, steps: int = 1, loss: float | None = 5.0, norm: float | None = 1.0, **seen: Any) -> StepPlan:
        for _ in range(steps):
            self.step += 1
            self.actions = self.policy.observe(Observation(self.step, grad_norm=norm, loss=loss, **seen))
            self.plan = self.policy.begin(self.step)
        return self.plan

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


SEVERE: list[tuple[dict[str, Any], str]] = [
    ({"norm": 401.0}, "gradient norm 401 is 401 times the usual norm"),
    ({"norm": math.inf, "applied": False}, "grad_norm not finite"),
    ({"loss": math.nan}, "loss not finite"),
    ({"residual_norm": 301.0}, "residual norm 301 is 100 times the usual norm"),
]
PERSISTENT: list[tuple[dict[str, Any], str]] = [
    ({"norm": 21.0}, "gradient norm 21 is 21 times the usual norm"),
    ({"norm": 1e-5}, "vanished"),
    ({"loss": 6.6}, "loss 6.6 is far above the usual 5"),
    ({"residual_norm": 31.0}, "residual norm 31 is 10.3 times"),
]


def test_residuals_are_sent_again_if_the_step_that_sends_them_is_skipped() -> None:
    run = Run(cooldown_steps=30)
    run.observe(10)
    assert run.observe(loss=math.nan).flush
    for _ in range(2):
        assert run.observe(norm=math.inf, applied=False).flush
    assert not run.observe().flush


@pytest.mark.parametrize(("seen", "words", "times"), [(*one, 1) for one in SEVERE] + [(*one, 6) for one in PERSISTENT])
def test_anomalies_switch_compression_off_and_it_returns_rung_by_rung(
    seen: dict[str, Any], words: str, times: int
) -> None:
    run = Run(cooldown_steps=3)
    run.observe(10, residual_norm=3.0)
    times = times if "vanished" not in words else run.config.guard.window
    assert brief(run.observe(times - 1, **seen).settings if times > 1 else run.plan.settings) == "blockwise bits=4"
    assert not run.events
    plan = run.observe(**seen)
    assert (plan.settings.method, plan.flush) == ("none", True)
    assert run.actions.check_residuals
    [event] = run.events
    assert event.kind == "anomaly"
    assert words in event.reason
    assert (event.before, event.after) == ("blockwise bits=4", "none")
    assert brief(run.observe(2).settings) == "none"
    assert not run.plan.flush
    assert brief(run.observe(1).settings) == "blockwise bits=8"
    assert brief(run.observe(3).settings) == "blockwise bits=4"
    assert run.kinds == ["anomaly", "return", "return"]
    run.observe(20)
    assert len(run.events) == 3


@pytest.mark.parametrize(
    "seen", [{"norm": 19.0}, {"norm": 2e-4}, {"norm": 0.0}, {"loss": 6.4}, {"residual_norm": 29.0}, {"loss": None}]
)
def test_figures_within_the_thresholds_are_not_anomalies(seen: dict[str, Any]) -> None:
    run = Run()
    run.observe(10, residual_norm=3.0)
    run.observe(12, **seen)
    assert not run.events


@pytest.mark.parametrize(("seen", "_"), PERSISTENT)
def test_a_few_unusual_batches_are_not_an_anomaly(seen: dict[str, Any], _: str) -> None:
    run = Run()
    run.observe(10, residual_norm=3.0)
    for _ in range(20):
        run.observe(5, **seen)
        run.observe(12, residual_norm=3.0)
    assert not run.events


@pytest.mark.parametrize(("seen", "_"), [*SEVERE[:1], *PERSISTENT[:3]])
def test_nothing_is_an_anomaly_before_a_full_window_is_known(seen: dict[str, Any], _: str) -> None:
    run = Run(window=64)
    run.observe(63)
    assert not run.guard.skips(1e9)
    run.observe(1, **seen)
    assert not run.events


def test_steps_of_two_kinds_are_not_anomalies() -> None:
    """Three steps in eight have gradients that are a million times as large as those of the others."""
    run = Run(window=64)
    for step in range(400):
        run.observe(norm=1.0 if step % 8 < 3 or step < 64 else 1e-6, loss=2.0 + (step % 8 < 3))
        assert not run.guard.skips(1.0)
    assert not run.events


def test_negative_losses_are_not_behind_their_best() -> None:
    run = Run(rollback={"behind": 0.05, "patience": 5})
    run.observe(60, loss=-5.0)
    assert not run.events


def test_each_anomaly_softens_by_one_rung() -> None:
    run = Run(on_anomaly="soften", cooldown_steps=9)
    run.observe(10)
    assert brief(run.observe(norm=1e3).settings) == "blockwise bits=8"
    assert brief(run.observe(norm=1e4, applied=False).settings) == "none"
    assert brief(run.observe(norm=1e4, applied=False).settings) == "none"


@pytest.mark.parametrize("guard", [{"on_anomaly": "report"}, {"dry_run": True}])
def test_reports_and_dry_runs_change_nothing(guard: dict[str, Any]) -> None:
    run = Run(**guard)
    run.observe(10)
    assert brief(run.observe(norm=1000.0).settings) == "blockwise bits=4"
    [event] = run.events
    assert event.dry_run == guard.get("dry_run", False)
    assert not guard.get("dry_run") or not run.guard.skips(1000.0)


def test_only_a_limited_number_of_exploding_steps_is_skipped() -> None:
    run = Run()
    assert not run.guard.skips(1e9)
    run.observe(10)
    assert not run.guard.skips(399.0)
    for _ in range(5):
        assert run.guard.skips(401.0)
        run.observe(norm=401.0, applied=False)
    assert not run.guard.skips(401.0)
    assert run.guard.skips(math.inf)
    run.observe(8, norm=401.0)
    assert not run.guard.skips(401.0)
    assert run.guard.skips(401.0 * 401.0)


def test_a_skipped_step_does_not_change_the_usual_figures() -> None:
    run = Run()
    run.observe(10, norm=2.0)
    before = run.policy.saved()["guard"]
    run.observe(norm=5000.0, applied=False)
    run.observe(norm=2.0, loss=9.9)
    after = run.policy.saved()["guard"]
    assert after["norms"] == before["norms"]
    assert 9.9 not in after["losses"]
    assert after["losses"] == before["losses"]


@pytest.mark.parametrize(("norm", "damaged"), [(math.inf, True), (31.0, True), (29.0, False)])
def test_damaged_residuals_are_cleared(norm: float, damaged: bool) -> None:
    run = Run()
    run.observe(3, residual_norm=3.0)
    assert run.guard.damaged(4, run.plan, norm) == damaged
    assert run.kinds == ["residuals_cleared"] * damaged


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_weights_are_compressed_if_deepspeed_reduces_the_gradients(warmup_steps: int) -> None:
    section = config(
        gradients={"method": "none"},
        weights={"bits": 8},
        schedule={"warmup_steps": warmup_steps},
        guard={"full_sync_every": 5},
    )
    policy = Policy(section, None, lambda event: None)
    plans = [policy.begin(step) for step in range(8)]
    assert [plan.dense for plan in plans] == [step < warmup_steps or step == 4 for step in range(8)]
    assert [plan.sync for plan in plans] == [step == 4 for step in range(8)]


def test_a_full_synchronization_takes_place_every_n_steps() -> None:
    run = Run(full_sync_every=4)
    plans = [run.plan, *(run.observe() for _ in range(11))]
    assert [step for step, plan in enumerate(plans) if plan.sync] == [3, 7, 11]
    assert all(plan.flush == plan.sync for plan in plans)
    assert [(event.kind, event.step) for event in run.events] == [("full_sync", 4), ("full_sync", 8)]


def falling(steps: int) -> Iterator[float]:
    return (5.0 - 0.02 * step for step in range(steps))


def test_a_rollback_to_softer_settings_is_permanent() -> None:
    run = Run(rollback={"behind": 0.1, "patience": 5}, loss_spike=9.0, cooldown_steps=2, window=8)
    for loss in falling(20):
        run.observe(loss=loss)
    run.observe(30, loss=5.5)
    [event] = run.events
    assert (event.kind, event.before, event.after) == ("rollback", "blockwise bits=4", "blockwise bits=8")
    assert "above its best" in event.reason
    assert brief(run.observe(20, loss=5.5).settings) == "blockwise bits=8"


def test_a_rollback_restores_the_settings_of_the_best_loss() -> None:
    phases = [{"until": 0.5, "gradients": {"bits": 8}}, {"gradients": {"bits": 2}}]
    events: list[Event] = []
    section = config(
        schedule={"phases": phases, "total_steps": 40},
        guard={"rollback": {"behind": 0.1, "patience": 5}, "window": 8, "loss_spike": 9.0},
    )
    policy = Policy(section, 40, events.append)
    for step, loss in enumerate([*falling(20), *[5.5] * 20], start=1):
        policy.observe(Observation(step, grad_norm=1.0, loss=loss))
        plan = policy.begin(step)
    assert [event.kind for event in events] == ["schedule", "rollback"]
    assert (events[1].before, events[1].after) == ("blockwise bits=2", "blockwise bits=8")
    assert brief(plan.settings) == "blockwise bits=8"


def test_a_checkpoint_is_loaded_only_if_nothing_is_compressed() -> None:
    run = Run(
        {"method": "bf16"},
        rollback={"behind": 0.1, "patience": 5, "checkpoint": True},
        window=8,
        loss_spike=9.0,
    )
    for loss in falling(20):
        run.observe(loss=loss)
    loads = []
    for _ in range(20):
        run.observe(loss=5.5)
        loads.append(run.actions.load_checkpoint)
        assert not loads[-1] or run.plan.settings.method == "none"
    assert run.kinds[:1] == ["rollback"]
    for _ in range(20):
        run.observe(loss=6.5)
        loads.append(run.actions.load_checkpoint)
    assert any(loads)
    assert "checkpoint_rollback" in run.kinds


def test_a_resumed_policy_makes_the_same_decisions() -> None:
    guard = {"cooldown_steps": 7, "rollback": {"patience": 5}, "residual_every": 2}
    straight = Run(**guard)
    straight.observe(12, residual_norm=2.0)
    straight.observe(norm=1000.0)
    straight.observe(4)
    resumed = Run(**guard)
    resumed.policy.load(json.loads(json.dumps(straight.policy.saved())))
    resumed.step = straight.step
    assert resumed.policy.saved() == straight.policy.saved()
    for _ in range(20):
        assert resumed.observe() == straight.observe()
    assert resumed.events == straight.events[1:]


ROLLBACK = {"rollback": {"behind": 0.1, "patience": 5}, "window": 8, "loss_spike": 9.0}
PHASES = {"phases": [{"until": 0.5, "gradients": {"bits": 8}}, {"gradients": {"bits": 2}}], "total_steps": 40}


def pinned_state() -> dict[str, Any]:
    """Return the state of a policy that has rolled back to the 8 bits of an earlier phase."""
    policy = Policy(config(schedule=PHASES, guard=ROLLBACK), 40, lambda event: None)
    for step, loss in enumerate([*falling(20), *[5.5] * 20], start=1):
        policy.observe(Observation(step, grad_norm=1.0, loss=loss))
        policy.begin(step)
    saved: dict[str, Any] = json.loads(json.dumps(policy.saved()))
    assert saved["pinned"] == {"method": "blockwise", "bits": 8}
    return saved


def resume(saved: dict[str, Any], total: int | None, **section: Any) -> str:
    policy = Policy(config(**section), total, lambda event: None)
    policy.load(saved)
    return brief(policy.begin(40).settings)


def test_a_rollback_survives_a_resume() -> None:
    assert resume(pinned_state(), 40, schedule=PHASES, guard=ROLLBACK) == "blockwise bits=8"


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ({"schedule": PHASES}, "blockwise bits=2"),
        ({"schedule": PHASES, "guard": {}}, "blockwise bits=2"),
        ({"schedule": PHASES, "guard": {**ROLLBACK, "dry_run": True}}, "blockwise bits=2"),
        ({"gradients": {"method": "sign"}, "guard": ROLLBACK}, "sign"),
    ],
)
def test_a_rollback_ends_if_the_section_has_changed(section: dict[str, Any], settings: str) -> None:
    assert resume(pinned_state(), 40, **section) == settings


def soften(**section: Any) -> tuple[dict[str, Any], Any]:
    """Return the state of a guard that has softened by one rung, and a policy to load it."""
    run = Run({"bits": 2}, on_anomaly="soften", window=8)
    run.observe(10)
    run.observe(6, norm=100.0)
    assert brief(run.plan.settings) == "blockwise bits=4"
    return json.loads(json.dumps(run.policy.saved())), Policy(config(**section), None, lambda event: None)


def test_softening_ends_if_the_gradient_settings_have_changed() -> None:
    """One rung above 2 bits is 4 bits; one rung above signs is something else."""
    saved, policy = soften(gradients={"method": "sign"}, guard={"window": 8})
    policy.load(saved)
    assert brief(policy.begin(16).settings) == "sign"


def test_softening_survives_changes_of_other_keys() -> None:
    saved, policy = soften(gradients={"bits": 2}, guard={"cooldown_steps": 9, "window": 8}, monitor={"every": 7})
    policy.load(saved)
    assert brief(policy.begin(16).settings) == "blockwise bits=4"


def resume_auto(**section: Any) -> bool:
    """Return True if 4 bits, which were slower than no compression, are not measured again under `section`."""
    policy = Policy(config(auto={}, gradients={"bits": 4}, weights={"bits": 4}), None, lambda event: None)
    assert policy.auto is not None
    while policy.auto.measures:
        if policy.auto.see(100.0 if policy.auto.alone else 200.0, ()):
            policy.auto.choose(12, policy.auto.figures(can_switch=True))
    again = Policy(config(auto={}, **section), None, lambda event: None)
    again.load(json.loads(json.dumps(policy.saved())))
    assert again.auto is not None
    return not again.auto.measures


def test_auto_compares_again_if_what_it_compares_has_changed() -> None:
    bits = {"bits": 4}
    assert resume_auto(gradients=bits, weights=bits, monitor={"every": 7})
    assert not resume_auto(gradients={"bits": 2}, weights=bits)
    assert not resume_auto(gradients=bits, weights={"bits": 8})


def test_the_order_of_candidates_does_not_change_the_section() -> None:
    def policy(*bits: int) -> Policy:
        adaptive = {"candidates": [{"bits": one} for one in bits]}
        return Policy(config(gradients={"bits": 8}, adaptive=adaptive, guard={}), None, lambda event: None)

    assert policy(4, 2).saved()["of"] == policy(2, 4).saved()["of"] != policy(4).saved()["of"]


def test_saved_settings_do_not_depend_on_an_edited_section() -> None:
    policy = Policy(config(gradients={"bits": 4}, guard={}), None, lambda event: None)
    edited = Policy(config(gradients={"bits": 4, "min_numel": 7}, guard={}), None, lambda event: None)
    edited.load(json.loads(json.dumps(policy.saved())))
    assert edited._plan.settings.min_numel != 7


WEIGHT_PHASES = {
    "phases": [{"until": 0.25, "weights": {"bits": 8}}, {"until": 0.5}, {"weights": {"method": "sign"}}],
    "total_steps": 8,
}


def test_weights_have_their_own_phases() -> None:
    events: list[Event] = []
    policy = Policy(config(weights={"bits": 4}, schedule=WEIGHT_PHASES), 8, events.append)
    found = [brief(policy.begin(step).weights) for step in range(10)]
    assert found == ["blockwise bits=8"] * 2 + ["blockwise bits=4"] * 2 + ["sign"] * 6
    assert [event.step for event in events] == [2, 4]
    assert events[1].after == "blockwise bits=8, weights sign"


@pytest.mark.parametrize(
    ("section", "stage", "place"),
    [
        ({"schedule": WEIGHT_PHASES}, 1, "/deepspeed_compress/schedule/phases"),
        ({"weights": {"bits": 4}, "schedule": WEIGHT_PHASES}, 3, "/deepspeed_compress/schedule/phases"),
        (
            {"weights": {}, "schedule": {"phases": [{"weights": {"overlap": True}}], "total_steps": 8}},
            1,
            "/deepspeed_compress/schedule/phases/0/weights/overlap",
        ),
        (
            {"weights": {}, "schedule": {"phases": [{"weights": {"bits": 5}}], "total_steps": 8}},
            1,
            "/deepspeed_compress/schedule/phases/0/weights/bits",
        ),
    ],
)
def test_impossible_phases_of_weights_are_refused(section: dict[str, Any], stage: int, place: str) -> None:
    problems = find_problems({SECTION: section, "zero_optimization": {"stage": stage}})
    assert [problem.pointer for problem in problems] == [place]


def test_observations_without_figures_change_nothing() -> None:
    run = Run()
    run.observe(50, loss=None, norm=None)
    assert not run.events
