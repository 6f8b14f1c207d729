"""Rules on memory: the size of residuals, and a growing peak."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from deepspeed_compress.config import SECTION, CompressedGradients
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.patches import with_gradients
from deepspeed_compress.tools.doctor.rule import rule

_SIZES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.02}
_SMALLER = {"fp32": "bf16", "bf16": "int8"}


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


@rule("warning", "whether peak memory keeps growing", "memory_bytes")
def memory_grows(case: Case) -> Iterator[Diagnostic]:
    peaks = [float(line["memory_bytes"]) for line in case.run.steps if line.get("memory_bytes") is not None]
    ends = [peaks[min(len(peaks) - 1, part * len(peaks) // 4)] for part in (1, 2, 3, 4)]
    steady = all(later - before >= case.limits.memory_steady * before for before, later in pairwise(ends))
    if steady and 0 < (1 + case.limits.memory_growth) * ends[0] <= ends[-1]:
        first, last = case.run.steps[len(case.run.steps) // 4]["step"], case.run.steps[-1]["step"]
        yield Diagnostic(
            at_steps(first, last),
            f"Peak memory keeps growing, by {ends[-1] / ends[0] - 1:.0%} from step {first} to step {last}",
            "Look for code that keeps tensors of every step: losses without .item(), outputs, growing caches. "
            "This package allocates nothing after the first compressed step.",
            evidence={
                f"peak memory, bytes, after {part} quarters": end for part, end in zip((1, 2, 3, 4), ends, strict=True)
            },
            weight=min(1.0, ends[-1] / ends[0] - 1),
        )
