"""Rules on weights for rollout workers: how old those of rollouts are, and what versions consist of."""

import statistics
from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.patches import with_section
from deepspeed_compress.tools.doctor.rule import rule


@rule("warning", "whether rollouts come from weights that are too old", "config", "lag")
def old_rollouts(case: Case) -> Iterator[Diagnostic]:
    settings = case.section.rollout
    lags = case.values("rollout_lag", case.run.versions)
    if settings is None or not lags or statistics.fmean(lags) <= settings.max_lag:
        return
    yield Diagnostic(
        at_steps(*_span(case)),
        f"Rollouts are {statistics.fmean(lags):.1f} versions behind the weights that learn from them (max_lag: "
        f"{settings.max_lag})",
        "Add rollout workers, let them update between requests, or wait for their samples before the next step. A "
        "version for several steps (every) makes the same samples fewer versions old, but not younger.",
        evidence={
            "versions behind, mean": statistics.fmean(lags),
            "versions behind, at most": max(lags),
            "age of a version when it is replaced, ms": _median(case, "rollout_age_ms"),
        },
    )


@rule("warning", "whether full copies of weights for rollout workers outweigh the changes", "config", "versions")
def frequent_full_copies(case: Case) -> Iterator[Diagnostic]:
    """Report full copies with most of the bytes. The first version of a run needs one, and is left out."""
    settings = case.section.rollout
    later = case.run.versions[1:]
    full, changes = (sum(case.values(key, later)) for key in ("rollout_full_bytes", "rollout_bytes"))
    if settings is None or not full or full < case.limits.full_copies * (full + changes):
        return
    copies = sum(1 for line in later if line.get("rollout_full_bytes"))
    longer = 4 * settings.full_every
    yield Diagnostic(
        at_steps(*_span(case)),
        f"Full copies are {full / (full + changes):.0%} of the bytes that are published for rollout workers",
        f"Publish a full copy every {longer} versions. If there are more of them than full_every says, look for "
        "versions that could not be written, and for restarts from a checkpoint that is older than the newest version.",
        patch=case.patch(with_section, {"rollout": {"full_every": longer}}),
        evidence={
            "versions": len(later),
            "full copies": copies,
            "bytes of full copies": full,
            "bytes of changes": changes,
        },
    )


def _span(case: Case) -> tuple[int, int]:
    """Return the first and last step with a version. The first version of a run belongs to no step."""
    return case.run.versions[1]["step"], case.run.versions[-1]["step"]


def _median(case: Case, key: str) -> float:
    return statistics.median(case.values(key, case.run.versions) or [0.0])
