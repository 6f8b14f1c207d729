"""Outcomes of programs: each run is compared with DeepSpeed's own run in the same processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from tests.backends.deepspeed.programs.ranks import Result, Task

EXACT = frozenset({"plain", "none", "raw", "auto", "background", "islands"})
"""Sections that must be bit-identical to DeepSpeed. With the others, ranks must agree if DeepSpeed's ranks agree."""


NOTHING = ("nothing", torch.empty(0))
"""Stand-in for a missing record if one run has fewer records than the other."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    `kind` is one of `COMPARISONS`, "refused", "fails" (an error other than a refusal), or "differs". `text` explains
    it.
    """

    kind: str
    text: str = ""

    def fulfils(self, other: "Outcome") -> bool:
        return self.kind == other.kind and other.text in self.text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def wanted(task: Task) -> Outcome:
    """Return the expected outcome. Of messages, `text` holds a part."""
    program, stage = task.program, task.stage
    if stage in program.fails:
        return Outcome("fails", program.fails[stage])
    refusals: Mapping[str, Mapping[int, str]] = {
        "raw": program.refused,
        "auto": program.refused,
        "4 bits": program.refused,
        "nodes": program.refused,
        "raw nodes": program.refused,
        "overlap": {3: "weights/overlap"},
        "weights": {**program.refused_weights, **program.refused},
    }
    if stage in refusals.get(task.section, {}):
        return Outcome("refused", refusals[task.section][stage])
    return Outcome(kind(task))


def kind(task: Task) -> str:
    if task.section in ("nodes", "raw nodes") or (task.section in ("raw", "auto") and task.program.rounded):
        return "near"
    return "equal" if task.section in EXACT else "ranks equal"


def found(task: Task, results: Mapping[Task, Sequence[Result]]) -> Outcome:
    """Return the outcome of `task`, compared with the run without the package."""
    ours, plain = results[task], results[Task(task.program, task.stage, "plain")]
    failures = [result for result in ours if result.error]
    if failures:
        # If a rank ends, its neighbors report a lost connection. Prefer the error that caused it.
        first = min(
            failures,
            key=lambda result: any(part in result.error for part in ("gloo", "onnection", "imed out", "hangs")),
        )
        return Outcome("refused" if first.refused else "fails", first.error)
    if any(result.error for result in plain):
        return Outcome("differs", "runs, which DeepSpeed alone does not")
    difference = COMPARISONS[kind(task)](ours, plain)
    return Outcome("differs", difference) if difference else Outcome(kind(task))


def differing(ours: Sequence[Result], plain: Sequence[Result]) -> str:
    """Return the first record that is not bit-identical to DeepSpeed's, or "" if there is none."""
    return unlike(ours, plain, lambda label: 0.0)


def drifting(ours: Sequence[Result], plain: Sequence[Result]) -> str:
    """Return the first loss or norm that is not close to DeepSpeed's, or "" if there is none.

    Weights are not compared, because Adam amplifies their last bits to whole steps.
    """
    return unlike(ours, plain, lambda label: float("inf") if "weights of engine" in label else 1e-2)


def unlike(ours: Sequence[Result], plain: Sequence[Result], tolerance: Callable[[str], float]) -> str:
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        for (label, value), (name, expected) in zip_longest(mine.records, theirs.records, fillvalue=NOTHING):
            if label != name:
                return f"rank {rank}: {label} for {name}"
            if not same(value, expected, tolerance(label)):
                return f"rank {rank}: {label} differs by {distance(value, expected)}"
    return ""


def diverging(ours: Sequence[Result], plain: Sequence[Result]) -> str:
    """Return the first record that differs among ranks or is not finite, unless the plain record is so too.

    Returns "" if there is none.
    """
    mine, theirs = [dict(result.records) for result in ours], [dict(result.records) for result in plain]
    for rank, (values, expected) in enumerate(zip(mine, theirs, strict=True)):
        if list(values) != list(expected):
            return f"rank {rank}: other records"
        for label, value in values.items():
            if torch.isfinite(expected[label]).all() and not torch.isfinite(value).all():
                return f"{label} is not finite"
    for rank, ((one, other), (expected, another)) in enumerate(zip(pairwise(mine), pairwise(theirs), strict=True)):
        for label in one.keys() & other.keys():
            if same(expected[label], another[label]) and not same(one[label], other[label]):
                return f"ranks {rank}, {rank + 1}: {label} differs by {distance(one[label], other[label])}"
    return ""


def same(one: Tensor, other: Tensor, tolerance: float = 0.0) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def distance(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} for {tuple(other.shape)}"
    return f"{float((one.double() - other.double()).abs().max()):.3g}"


COMPARISONS: Mapping[str, Callable[[Sequence[Result], Sequence[Result]], str]] = {
    "equal": differing,
    "near": drifting,
    "ranks equal": diverging,
}
