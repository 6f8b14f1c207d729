"""A step that DeepSpeed skips leaves no trace, and residuals follow the loss scale."""

import logging

import pytest
import torch
from deepspeed.utils import logger

from deepspeed_compress.backends.deepspeed.norms import loss_scale
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, engines, run, start, train, train_on, weights
from tests.support.methods import BF16, FP16, UNCLIPPED
from tests.support.resuming import residuals_of

SAMPLED = pytest.mark.sampled(4)

INT4 = {"gradients": {"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}}


@pytest.mark.case_a_stage
@pytest.mark.parametrize("section", [INT4, {"gradients": {"method": "topk", "density": 0.1, "block_size": 64}}])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_skipped_step_leaves_no_trace(stage, section):
    """After a NaN in one rank's batch every rank skips the step, and training continues as if it had not happened."""
    section = {**section, "seed": 1}
    poisoned = Job(stage=stage, section=section, steps=5, poison=(2, 1), accumulation=2)
    without = Job(stage=stage, section=section, steps=5, skip=(2,), accumulation=2)
    for bad, good in run_forks(2, train, poisoned, without):
        assert bad.skipped == 1
        assert bad.parameters == good.parameters


def fp16_run(rank: int, stage: int, section: dict = INT4) -> list[dict]:
    """Return residuals and loss scale before and after every step. One step has an infinite gradient."""
    job = Job(stage=stage, section=section, extra=FP16, steps=8)
    engine = start(job)
    seen = []
    for step, batch in enumerate(data(rank, job)):
        if step == 4 and rank == 1:
            batch = (batch[0] * 3e4, batch[1])
        before = snapshot(engine)
        run(engine, [batch])
        events = [str(event) for event in engine.compression.events]
        seen.append({"before": before, "after": snapshot(engine), "skipped": engine.skipped_steps, "events": events})
    assert all(torch.isfinite(torch.tensor(values)).all() for values in weights(engine).values())
    engine.destroy()
    return seen


def fp16_runs(rank: int, stage: int) -> list[list[dict]]:
    """Return what `fp16_run` returns with a guard, and without one."""
    return [fp16_run(rank, stage, {**INT4, "guard": {}}), fp16_run(rank, stage)]


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_guard_does_not_mistake_an_overflow_for_an_anomaly(stage):
    """A loss scale that was too large is not an anomaly, and a guard changes nothing else."""
    for with_guard, without in run_forks(2, fp16_runs, stage):
        assert with_guard == without
        assert not with_guard[-1]["events"]


def snapshot(engine) -> dict:
    residuals = {
        str((direction, *piece)): values for direction, kept in residuals_of(engine).items() for piece, values in kept
    }
    return {"scale": loss_scale(engine), "residuals": residuals}


AUTOCAST = {
    "torch_autocast": {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
}


def scaler_of(engine) -> torch.amp.GradScaler:
    """Return the gradient scaler of fp16 autocast, which belongs to the engine without ZeRO."""
    return engine.torch_autocast_z0_gradscaler or engine.optimizer.torch_autocast_gradscaler


def autocast_run(rank: int, *stages: int) -> list[list[dict]]:
    """Return torch's own scale and that of the residuals after every step of fp16 autocast."""
    found = []
    for job, engine in engines(*(Job(stage, INT4, extra=AUTOCAST, steps=4) for stage in stages)):
        scaler = scaler_of(engine)
        scaler._init_scale, scaler._growth_interval = 4.0, 2
        seen = []
        for batch in data(rank, job):
            run(engine, [batch])
            seen.append({"scale": scaler.get_scale(), "clock": engine.compression.clock.loss_scale})
        found.append(seen)
    return found


def test_the_scale_of_fp16_autocast_is_seen():
    """The scale grows after every second step, and residuals are in its units from then on."""
    for stages in run_forks(2, autocast_run, 0, 1, 2, 3):
        for seen in stages:
            assert seen[-1]["scale"] > seen[0]["scale"]
            assert [step["clock"] for step in seen] == [step["scale"] for step in seen]


def autocast_overflow(rank: int, section: dict) -> dict:
    """Snapshots before and after a step without ZeRO that torch's gradient scaler skips, and the guard's events."""
    job = Job(section=section, extra=AUTOCAST, steps=4)
    engine = start(job)
    seen = []
    for step, (x, y) in enumerate(data(rank, job)):
        run(engine, [(x * 1e4, y) if step == 2 and rank == 1 else (x, y)])
        seen.append({**snapshot(engine), "parameters": weights(engine)})
    events = [event.kind for event in engine.compression.events]
    return {"before": seen[1], "after": seen[2], "last": seen[3], "events": events}


@pytest.mark.parametrize("section", [INT4, {**INT4, "guard": {}}], ids=["", "guard"])
def test_a_step_that_torch_skips_leaves_no_trace(section):
    for rank in run_forks(2, autocast_overflow, section):
        before, after = rank["before"], rank["after"]
        assert after["scale"] == before["scale"] / 2
        assert after["parameters"] == before["parameters"] != rank["last"]["parameters"]
        assert after["residuals"] == {
            piece: [value / 2 for value in values] for piece, values in before["residuals"].items()
        }
        assert "anomaly" not in rank["events"]


WATCHED = {**INT4, "guard": {"window": 8, "cooldown_steps": 2}}
EXPLODES = 14


def explode(rank: int, stage: int, extra: dict) -> dict:
    """Train with a huge but finite gradient in one step.

    Return the states of the loss scaler, the skipped steps, the anomalies, and the log.
    """
    records = LogRecords()
    logger.addHandler(records)
    job = Job(stage=stage, section=WATCHED, extra=extra, steps=EXPLODES + 4)
    engine, scalers = start(job), []
    for step, (x, y) in enumerate(data(rank, job)):
        loss = (engine(x.to(next(engine.module.parameters()).dtype)).float() - y).square().mean()
        train_on(engine, loss * (2000.0 if step == EXPLODES else 1.0))
        scaler = vars(engine.optimizer.loss_scaler)
        scalers.append({key: value for key, value in scaler.items() if key.startswith("cur_")})
    events = [event.reason for event in engine.compression.events if event.kind == "anomaly"]
    return {"scalers": scalers, "skipped": engine.skipped_steps, "events": events, "texts": records.texts}


class LogRecords(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


LOW = {**FP16["fp16"], "initial_scale_power": 1, "loss_scale_window": 1000}


@pytest.mark.case_a_stage
@pytest.mark.parametrize("extra", [{"fp16": LOW}, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_the_guard_skips_is_no_overflow(stage, extra):
    """The loss scale stays, the scaler does not count the step, and the log does not mention an overflow."""
    first, second = run_forks(2, explode, stage, extra)
    for rank in (first, second):
        assert rank["skipped"] == 1
        assert rank["scalers"][EXPLODES] == rank["scalers"][EXPLODES - 1]
        assert "gradient norm" in rank["events"][0]
        assert not [text for text in rank["texts"] if "OVERFLOW" in text]


FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "fused": True}}}


def explode_in_autocast(rank: int, *extras: dict) -> list[dict]:
    """Run a step without ZeRO whose gradient is far too large, and finite, once with each configuration."""
    section = {**WATCHED, "monitor": {"every": 1}}
    jobs = [Job(section=section, extra=extra, steps=EXPLODES + 3) for extra in extras]
    return [explode_once(engine, data(rank, job)) for job, engine in engines(*jobs)]


def explode_once(engine, batches: list) -> dict:
    norms, scales = [], []
    engine.compression.subscribe(lambda step: norms.append(step.grad_norm))
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        scaler._init_scale = 8.0
    for step, (x, y) in enumerate(batches):
        loss = (engine(x).float() - y).square().mean()
        train_on(engine, loss * (2000.0 if step == EXPLODES else 1.0))
        scales.append(1.0 if scaler is None else scaler.get_scale())
    events = [event.reason for event in engine.compression.events if event.kind == "anomaly"]
    return {"skipped": engine.skipped_steps, "events": events, "norms": norms, "scales": scales}


def test_the_guard_sees_norms_without_the_scale_of_torch():
    """They are those of fp32, whether torch, clipping or a fused optimizer divides gradients by the scale."""
    ways = {**AUTOCAST}, {**AUTOCAST, **UNCLIPPED}, {**AUTOCAST, **UNCLIPPED, **FUSED}, {**AUTOCAST, **FUSED}
    expected, *found = run_forks(2, explode_in_autocast, {}, *ways)[0]
    for one in found:
        assert one["skipped"] == 1
        assert "gradient norm" in one["events"][0]
        assert set(one["scales"]) == {8.0}
        # Without clipping, weights differ after the first step.
        assert one["norms"][0] == pytest.approx(expected["norms"][0], rel=0.02)
