"""Synthetic runs for the report and the doctor: a healthy run, and changes to it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, brief
from deepspeed_compress.tools.doctor.case import Case, Run
from deepspeed_compress.tools.doctor.command import Diagnosis, diagnose

STEPS = 40
Change = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]

HEALTHY: Mapping[str, Any] = {
    "method": "blockwise",
    "rank": 0,
    "bytes_sent": 2_700_000,
    "bytes_raw": 10_000,
    "bytes_uncompressed": 42_000_000,
    "bytes_weights": 2_700_000,
    "bytes_pipeline": 0,
    "bytes_tied": 0,
    "bytes_tensor": 0,
    "bytes_experts": 0,
    "bytes_islands": 0,
    "ratio": 15.6,
    "compress_ms": 5.0,
    "communicate_ms": 20.0,
    "decompress_ms": 5.0,
    "residual_norm": 0.5,
    "cosine": 0.98,
    "settings": "blockwise bits=4",
    "step_ms": 250.0,
    "busy_ms": 230.0,
    "busy_ms_median": 231.0,
    "busy_ms_max": 233.0,
    "memory_bytes": 900_000_000,
    "grad_norm": 2.0,
    "loss": 3.0,
}
GRADIENTS: Mapping[str, Any] = {"method": "blockwise", "bits": 4}
CONFIG: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def config(
    gradients: Mapping[str, Any] = GRADIENTS, extra: Mapping[str, Any] | None = None, **section: Any
) -> dict[str, Any]:
    """Return a ds_config with these settings. Weights have 4 bits unless `section` overrides them."""
    parts = {"gradients": dict(gradients), "weights": {"bits": 4}, **section}
    return {**CONFIG, **(extra or {}), SECTION: {key: value for key, value in parts.items() if value is not None}}


def losses(of: Callable[[int], float] = lambda step: 2 + 8 / step) -> tuple[tuple[int, float], ...]:
    return tuple((step, of(step)) for step in range(1, STEPS + 1))


def run(change: Change = MappingProxyType({}), ds_config: Any = None, steps: int = STEPS, **more: Any) -> Run:
    """Return a healthy run with `change` applied to every step, and with `more` fields of Run."""
    ds_config = config() if ds_config is None else ds_config
    section = CompressConfig.model_validate(ds_config[SECTION])
    own = {"method": section.gradients.method, "settings": brief(section.gradients)}
    changed = change if callable(change) else lambda step: change
    lines = tuple(
        {"step": step, "slowest_rank": step % 2, **HEALTHY, **own, **changed(step)} for step in range(1, steps + 1)
    )
    given = {"events": (), "losses": losses(), **more}
    return Run(Path("run"), lines, config=ds_config, section=section, **given)


def examine(found: Run, baseline: Run | None = None) -> Diagnosis:
    return diagnose(Case(found, baseline))


def names(found: Run, baseline: Run | None = None) -> list[str]:
    """Return the names of the doctor's findings, worst first."""
    return [diagnostic.name for diagnostic in examine(found, baseline).diagnostics]
