"""Rules on the guard, which may act too often or for too long, and on skipped steps."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config import Guard, brief
from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.patches import slower, softer, with_gradients, with_section
from deepspeed_compress.tools.doctor.rule import rule
from deepspeed_compress.tools.run_directory import Line

_COOLDOWN = 50
"""Steps without an anomaly after which the guard moves back one level, unless the configuration states otherwise."""
_SHOWN = 5
_BOUNDS = ("exploding", "loss_spike", "residual_growth")


@rule("warning", "how often the guard fired, and whether the settings returned", "events")
def guard_fires_often(case: Case) -> Iterator[Diagnostic]:
    """Report anomalies so frequent that settings cannot return between two of them, or settings that never returned.

    Anomalies in the dense steps at the start are ignored, because compression does not cause them.
    """
    dense = case.run.section.schedule.warmup_steps if case.run.section is not None else 0
    found = [event for event in case.run.events or () if event["kind"] == "anomaly" and event["step"] > dense]
    anomalies = [event for event in found if not _not_finite(event)]
    if len(anomalies) < case.limits.anomalies:
        return
    first, last = anomalies[0]["step"], case.run.steps[-1]["step"]
    between, away = (last - first + 1) / len(anomalies), _away(case, first)
    if between > _cooldown(case) and away < 0.5:
        return
    remedy, patch = _calmer(case)
    yield Diagnostic(
        at_steps(first, anomalies[-1]["step"]),
        f"The guard fires every {between:.0f} steps, and since the first time, the chosen settings have not been in "
        f"force for {away:.0%} of the steps",
        remedy,
        patch=patch,
        evidence={
            "anomalies": len(anomalies),
            "part of the steps since then without the settings": away,
            "reasons": _reasons(anomalies),
        },
        weight=max(away, min(1.0, _cooldown(case) / between / 2)),
    )


def _away(case: Case, first: int) -> float:
    """Return the fraction of the measured steps from `first` on in which the chosen settings were not in force."""
    section = case.run.section
    since = [line for line in case.run.steps if line["step"] >= first]
    if section is None or not since:
        return 0.0
    wanted = brief(section.gradients)
    return sum(bool(line.get("settings", wanted) != wanted) for line in since) / len(since)


def _cooldown(case: Case) -> int:
    guard = None if case.run.section is None else case.run.section.guard
    return _COOLDOWN if guard is None else guard.cooldown_steps


def _calmer(case: Case) -> tuple[str, Mapping[str, Any] | None]:
    """Return a remedy and its patch: default bounds if tighter ones are set, otherwise softer gradient settings."""
    section, config = case.run.section, case.run.config
    tight = _tighter(section.guard) if section is not None and section.guard is not None else []
    if config is not None and tight:
        keys = ", ".join(f"guard.{key}" for key in tight)
        what = f"Leave out {keys}: with the defaults, no healthy run has anomalies."
        return what, case.patch(with_section, {"guard": dict.fromkeys(tight)})
    change = softer(section.gradients) if section is not None else None
    return (
        "Send more of the gradient. If gradients also explode without compression, lower the learning rate.",
        None if change is None else case.patch(with_gradients, change),
    )


def _tighter(guard: Guard) -> list[str]:
    """Return the names of the bounds that are below their defaults."""
    written, usual = guard.model_dump(), Guard().model_dump()
    return [key for key in _BOUNDS if written[key] < usual[key]]


def _reasons(events: list[Line]) -> list[str]:
    return [f"step {event['step']}: {event.get('reason', '')}" for event in events[:_SHOWN]]


def _not_finite(event: Line) -> bool:
    return any(word in str(event.get("reason", "")).lower() for word in ("finite", "nan", "inf "))


@rule("warning", "how many steps were skipped", "events|grad_norm")
def skipped_steps(case: Case) -> Iterator[Diagnostic]:
    steps, late = _skipped_steps(case), case.run.steps[-1]["step"] - case.limits.skipped_from
    share = len(steps) / late if late > 0 else 0.0
    if share <= case.limits.skipped or len(steps) < case.limits.anomalies:
        return
    remedy, patch = _finite_again(case)
    yield Diagnostic(
        at_steps(steps[0], steps[-1]),
        f"{share:.0%} of the steps were skipped, because their gradients were not finite",
        remedy,
        patch=patch,
        evidence={"skipped steps": len(steps), "first skipped steps": steps[:_SHOWN]},
        weight=min(1.0, share),
    )


def _skipped_steps(case: Case) -> list[int]:
    """Return the skipped steps, from events and from a null gradient norm in runs that record it.

    A loss that is not finite is reported one step late and skips no step, so it is not counted.
    """
    anomalies = [event for event in case.run.events or () if event["kind"] == "anomaly"]
    found = {event["step"] for event in anomalies if "grad_norm not finite" in str(event.get("reason", ""))}
    if case.values("grad_norm", case.run.steps):
        found |= {line["step"] for line in case.run.steps if "grad_norm" in line and line["grad_norm"] is None}
    return sorted(step for step in found if step > case.limits.skipped_from)


def _finite_again(case: Case) -> tuple[str, Mapping[str, Any] | None]:
    config = case.run.config
    if config is None:
        return "Use bf16 in place of fp16, or a lower learning rate.", None
    fp16 = config.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled"):
        what = "Use bf16, which needs no loss scale, if the hardware supports it; otherwise lower the learning rate."
        return what, case.patch(_in_bf16)
    what = "Halve the learning rate, and look for bad data: without fp16, a loss scale cannot be the cause."
    return what, case.patch(slower)


def _in_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "fp16"} | {"bf16": {"enabled": True}}
