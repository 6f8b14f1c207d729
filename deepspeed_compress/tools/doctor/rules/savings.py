"""Rules on what settings save: nothing is compressed, compression is never in force, or bytes and memory are left."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.choice_names import LOSS, in_bits
from deepspeed_compress.config import SECTION, CompressedGradients, brief
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.patches import with_gradients, with_section
from deepspeed_compress.tools.doctor.rule import rule

_SIZES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.02}
_SMALLER = {"fp32": "bf16", "bf16": "int8"}


@rule("warning", "how much of the gradients is excluded from compression", "bytes_raw")
def nothing_compressed(case: Case) -> Iterator[Diagnostic]:
    parts = [raw / sent for raw, sent in zip(case.values("bytes_raw"), case.values("bytes_sent"), strict=False) if sent]
    share = sorted(parts)[len(parts) // 2] if parts else 0.0
    if share < case.limits.raw:
        return
    remedy, patch = _include_more(case)
    yield Diagnostic(
        at_steps(*case.span),
        f"Almost nothing is compressed: {share:.0%} of the gradient bytes sent belong to excluded parameters",
        remedy,
        patch=patch,
        evidence={"bytes sent": case.median("bytes_sent"), "of these, uncompressed": case.median("bytes_raw")},
        weight=share,
    )


def _include_more(case: Case) -> tuple[str, dict[str, Any] | None]:
    """Return a remedy for parameters excluded from compression, and its patch, for the first cause that applies."""
    section, config = case.run.section, case.run.config
    if config is None or section is None:
        return "Check gradients.min_numel and gradients.overrides.", None
    gradients = section.gradients
    if isinstance(gradients, CompressedGradients) and gradients.min_numel:
        what = f"Remove gradients.min_numel: {gradients.min_numel} excludes every smaller parameter."
        return what, case.patch(with_gradients, {"min_numel": None})
    if isinstance(gradients, CompressedGradients) and any(one.method == "none" for one in gradients.overrides):
        pairs = zip(config[SECTION]["gradients"]["overrides"], gradients.overrides, strict=True)
        kept = [written for written, override in pairs if override.method != "none"]
        what = "Remove the overrides with method none, or make their patterns narrower."
        return what, case.patch(with_gradients, {"overrides": kept or None})
    return "Stages or tensor-parallel ranks share these parameters, and no setting compresses them.", None


@rule(None, "whether the chosen method was in force", "config")
def never_in_force(case: Case) -> Iterator[Diagnostic]:
    """Report a method that was in force in no measured step, unless the policy decided so."""
    gradients, events = case.section.gradients, case.run.events or ()
    # Until `auto` decides, uncompressed steps are intended.
    decided = case.section.auto is not None or any(event["kind"] not in ("schedule", "full_sync") for event in events)
    if gradients.method == "none" or decided or _was_in_force(case):
        return
    last = case.run.steps[-1]["step"]
    what, patch = _schedule(case, last)
    yield Diagnostic(
        at_steps(case.run.steps[0]["step"], last),
        f'The chosen "{brief(gradients)}" was not in force in any of the {last:,} steps{_so_far(case)}: {what}',
        "Make the schedule end within the first tenth of the run.",
        patch=None if patch is None else case.patch(with_section, {"schedule": patch}),
        evidence={"last step": last, "in force": case.run.steps[-1].get("settings") or case.run.steps[-1]["method"]},
        severity="warning" if case.run.summary is not None else "info",
    )


def _was_in_force(case: Case) -> bool:
    """Return True if the chosen settings were in force, judged by the recorded settings or else by the method."""
    wanted, phases = case.section.gradients, case.section.schedule.phases
    if phases or not any("settings" in line for line in case.run.steps):
        return bool(case.compressed)
    return any(line.get("settings") == brief(wanted) for line in case.compressed)


def _so_far(case: Case) -> str:
    return "" if case.run.summary is not None else " so far"


def _schedule(case: Case, last: int) -> tuple[str, dict[str, Any] | None]:
    schedule = case.section.schedule
    if schedule.warmup_steps >= last:
        what = f"schedule.warmup_steps {schedule.warmup_steps:,} covers all of them"
        return what, {"warmup_steps": last // 10}
    if schedule.ramp is not None:
        return f"schedule.ramp.steps {schedule.ramp.steps:,} covers the rest", {"ramp": {"steps": max(1, last // 10)}}
    return "the schedule never reaches it", None


@rule("warning", "whether the method saves bytes", "config", "ratio")
def no_ratio(case: Case) -> Iterator[Diagnostic]:
    """Report that the settings save almost no bytes.

    Under ZeRO 1 and 2, DeepSpeed alone sends twice the bytes that are needed, so a ratio of 2 is reached without
    compression.
    """
    ratio, base = case.median("ratio"), 2.0 if case.stage in (1, 2) else 1.0
    excluded = case.median("bytes_raw") / (case.median("bytes_sent") or 1.0)
    if not 0 < ratio < base * case.limits.no_ratio or excluded >= case.limits.raw:
        return
    yield Diagnostic(
        at_steps(*case.span),
        f"The chosen settings save nothing: the compression ratio is {ratio:.2f}, but ZeRO {case.stage} reaches "
        f"{base:.0f} without compression",
        f'Choose "{in_bits(8)}", which has no measurable {LOSS}.',
        patch=case.patch(with_gradients, {"method": "blockwise", "bits": 8}),
        evidence={
            "ratio": ratio,
            "ratio of this stage without compression": base,
            "settings": brief(case.section.gradients),
        },
    )


@rule(None, "how much of the memory residuals take", "memory_bytes", "config")
def large_residuals(case: Case) -> Iterator[Diagnostic]:
    gradients = case.section.gradients
    key = "memory" if gradients.method in OWN_MOMENTUM else "error_feedback"
    kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
    peak = max(case.values("memory_bytes", case.run.steps))
    if kept is None or kept.device == "cpu" or not peak:
        return
    size = _residual_bytes(case, gradients.method, _SIZES[kept.dtype])
    if size < case.limits.memory * peak:
        return
    smaller = _SMALLER.get(kept.dtype)
    change = {"dtype": smaller} if smaller else {"device": "cpu"}
    yield Diagnostic(
        at_steps(*case.span),
        f"Residuals take about {size / peak:.0%} of the memory, in {kept.dtype}",
        f"Keep them in {smaller}." if smaller else "Keep them in host memory.",
        patch=case.patch(_with_residuals, key, change),
        evidence={"residuals, bytes": size, "peak memory, bytes": peak, f"gradients.{key}.dtype": kept.dtype},
        weight=size / peak,
        severity="warning" if kept.dtype == "fp32" else "info",
    )


def _with_residuals(config: Mapping[str, Any], key: str, change: Mapping[str, str]) -> dict[str, Any]:
    written = config[SECTION].get("gradients", {}).get(key) or {}
    return with_gradients(config, {key: {**written, **change}})


def _residual_bytes(case: Case, method: str, element: float) -> float:
    """Return the bytes of residuals.

    They cover the elements that a rank sends. They cover all elements if the rank also keeps a residual for its own
    part: without ZeRO, and for methods with their own momentum. A second copy is kept if a step may be skipped, which
    is the case for every optimizer except that of ZeRO 0 in fp32. Method dgc doubles the total.
    """
    ranks, whole = case.replicas or 1, case.stage == 0 or method in OWN_MOMENTUM
    elements = case.sent_elements * (ranks / (ranks - 1) if whole and ranks > 1 else 1)
    copies = 1 if case.stage == 0 and case.element_bytes == 4 else 2
    return elements * element * copies * (2 if method == "dgc" else 1)
