"""Directories of runs, for tests of the tools that read them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("schedule", "full_sync", "anomaly", "checkpoint_rollback", "return", "residuals_cleared", "adapt")
REASON = "gradient norm 3.1e+06 is 812,000 times the running median"
DENSE, SPARSE = 8_972_160, 90_000
SETTING = "topk density=0.01 values=blockwise bits=4"


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def small_run(directory: Path, loss: float, sent: int | None, **kinds: int | None) -> Path:
    """Write a finished run of three steps. `kinds`: other bytes of each step. If `sent` is None, none are measured."""
    metrics: list[dict[str, Any]] = [
        {"step": step, "train_loss": loss + 1 / step, "step_time_s": 0.1} for step in (1, 2, 3)
    ]
    write_lines(directory / "metrics.jsonl", [*metrics, {"step": 3, "eval_loss": loss}])
    if sent is not None:
        measured = {"bytes_sent": sent, "bytes_uncompressed": 8_000_000, "ratio": 8_000_000 / sent, **kinds}
        write_lines(directory / "compression.jsonl", [{"step": step, **measured} for step in (1, 2, 3)])
    summary = {"eval_loss": loss, "steps": 3, "config": "<ds>.json", "parameters": 1234}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def long_run(directory: Path, compressed: bool) -> Path:
    """Write a finished run of 400 steps with files of all kinds."""
    steps, loss = range(1, 401), {step: 5 + 3 * math.exp(-step / 90) for step in range(1, 401)}
    metrics = [{"step": step, "train_loss": loss[step], "step_time_s": 0.2 + step % 7 / 100} for step in steps]
    held_out = [{"step": step, "eval_loss": loss[step]} for step in steps[49::50]]
    write_lines(directory / "metrics.jsonl", [*metrics, *held_out])
    write_lines(directory / "compression.jsonl", [_measured(step, compressed) for step in steps[4::5]])
    change = {"reason": REASON, "before": "none", "after": SETTING}
    events = [{"step": 55 * index, "kind": kind, **change} for index, kind in enumerate(KINDS, 1)]
    write_lines(directory / "events.jsonl", events if compressed else [])
    (directory / "summary.json").write_text(json.dumps({"config": "a.json", "seed": 1}))
    return directory


def _measured(step: int, compressed: bool) -> dict[str, Any]:
    sparse = compressed and step > 60
    sent = SPARSE if sparse else DENSE
    sizes = {"bytes_sent": sent, "bytes_raw": sent // 10, "bytes_uncompressed": DENSE, "bytes_weights": DENSE // 2}
    times = {"compress_ms": 9.0, "communicate_ms": 22.0, "decompress_ms": 5.0}
    ranks = {"busy_ms_median": 180.0, "busy_ms_max": 320.0, "memory_bytes": 10**9 + step * 10**6}
    norms = {"residual_norm": 1 + step / 400, "grad_norm": 4e6 if step == 200 else 3.0, "cosine": 0.98 - step / 1e5}
    settings = SETTING if sparse else "none"
    return {"step": step, "settings": settings, "ratio": DENSE / sent, **sizes, **times, **ranks, **norms}


def trainer_run(directory: Path, place: str = ".", last: int = 20) -> Path:
    """Write Trainer's log of the first `last` of 20 steps to the directory `place` in `directory`."""
    log: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 9 - step / 10,
            "grad_norm": 1.5,
            "compression_ratio": 15.5,
            "compression_bytes_sent": 578_000,
        }
        for step in range(5, last + 1, 5)
    ]
    log.append({"step": last, "eval_loss": 6.5, "eval_runtime": 1.0})
    if last == 20:
        log.append({"step": last, "train_runtime": 6.0, "train_loss": 7.7})
    state = {"global_step": last, "max_steps": 20, "log_history": log}
    (directory / place).mkdir(parents=True, exist_ok=True)
    (directory / place / "trainer_state.json").write_text(json.dumps(state))
    return directory
