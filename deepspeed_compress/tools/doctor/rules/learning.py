"""Rules on learning: compression that is too strong, a loss that rises, a guard that acts often, and skipped steps."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deepspeed_compress.config import CompressedGradients, GradientsConfig, Guard, brief
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.config.sparse_methods import SparseConfig
from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.doctor.case import SAMPLES, Case
from deepspeed_compress.tools.doctor.patches import forgets, slower, softer, with_section
from deepspeed_compress.tools.doctor.rule import rule

_NEAR = 5
"""Maximum number of events to show."""
_MAD_TO_DEVIATION = 0.6745
"""Median absolute value of a standard normal variable."""


@dataclass(frozen=True)
class Symptom:
    """Symptom of too little of the gradient being sent."""

    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = "error"


@rule(
    None,
    "the size of residuals, the cosine of gradients, and the loss compared with the baseline",
    "config",
    "residual_norm|cosine|baseline",
)
def compression_too_strong(case: Case) -> Iterator[Diagnostic]:
    gradients = case.section.gradients
    if gradients.method == "none":
        return
    symptoms = [symptom for find in _SYMPTOMS for symptom in find(case, gradients)]
    if not symptoms:
        return
    yield case.finding(
        f"Compression is too strong for the model to learn well: {symptoms[0].text}",
        "Send more of the gradient, with error feedback. If that is not enough, begin with uncompressed steps "
        "(schedule.warmup_steps).",
        patch=case.gradients_patch(softer(gradients)),
        evidence={key: value for symptom in symptoms for key, value in symptom.figures.items()} | _settings(case),
        severity=symptoms[0].severity,
    )


def _settings(case: Case) -> dict[str, Any]:
    shown = case.compressed[-1].get("settings") or case.compressed[-1]["method"] if case.compressed else None
    return {"settings": shown} if shown else {}


def _discarded(case: Case, gradients: GradientsConfig) -> Iterator[Symptom]:
    if forgets(gradients) and case.compressed:
        share = f"{100 - 100 * gradients.density:.6g} %" if isinstance(gradients, SparseConfig) else "most"
        yield Symptom(
            f"{gradients.method} without error feedback discards {share} of each gradient for good",
            {"compression ratio of gradients": case.median("ratio")},
        )


def _withheld(case: Case, gradients: GradientsConfig) -> Iterator[Symptom]:
    """Yield a symptom if residuals hold the gradients of many steps. Intended delays (`every`) are allowed for."""
    if gradients.method in OWN_MOMENTUM:
        return
    lines = [line for line in case.compressed if line.get("residual_norm") and line.get("grad_norm")]
    overrides = gradients.overrides if isinstance(gradients, CompressedGradients) else ()
    limit = case.limits.delay + max((override.every for override in overrides), default=1) - 1
    late = [line["residual_norm"] / line["grad_norm"] for line in lines][len(lines) // 2 :]
    if len(lines) >= case.limits.lines and statistics.median(late) >= limit:
        yield Symptom(
            f"residuals are {statistics.median(late):.0f} times as large as a gradient, so gradients arrive about that "
            "many steps late",
            {"residual norm / gradient norm": statistics.median(late)},
        )


def _growing(case: Case, gradients: GradientsConfig) -> Iterator[Symptom]:
    residuals = case.values("residual_norm")
    if gradients.method in OWN_MOMENTUM or len(residuals) < case.limits.lines or not all(residuals):
        return
    growth, norms = _late_growth(residuals), case.values("grad_norm")
    if growth >= case.limits.growth * max(1.0, _late_growth(norms) if len(norms) >= case.limits.lines else 1.0):
        yield Symptom(
            f"residuals keep growing, by a factor of {growth:.1f} from the second quarter to the last",
            {"residual norm, last quarter / second quarter": growth},
        )


def _late_growth(values: list[float]) -> float:
    """Return the last quarter's median divided by that of the second. In the first quarter, residuals still fill up."""
    size = len(values)
    second, last = statistics.median(values[size // 4 : size // 2]), statistics.median(values[3 * size // 4 :])
    return last / second if second else 1.0


def _low_cosine(case: Case, gradients: GradientsConfig) -> Iterator[Symptom]:
    cosines = case.values("cosine")
    if gradients.method in OWN_MOMENTUM or len(cosines) < 4:
        return
    middle = statistics.median(cosines)
    if middle < case.limits.cosine:
        yield Symptom(
            f"the gradient that the step follows has a cosine of {middle:.2f} with the true one", {"cosine": middle}
        )


def _behind(case: Case, gradients: GradientsConfig) -> Iterator[Symptom]:
    gap = _loss_gap(case)
    if gap is not None and gap > case.limits.loss_gap:
        severity: Severity = "error" if gap > 5 * case.limits.loss_gap else "warning"
        yield Symptom(
            f"the loss is {gap:.1%} above that of the baseline", {"loss above baseline": f"{gap:.2%}"}, severity
        )


def _loss_gap(case: Case) -> float | None:
    """Return the mean relative loss difference to the baseline over the last quarter of common steps.

    Returns:
        The difference, or None if there is no baseline, too few common steps, or the difference of training losses is
        within their noise.
    """
    if case.baseline is None:
        return None
    for ours, theirs in ((case.run.held_out, case.baseline.held_out), (case.run.losses, case.baseline.losses)):
        other = dict(theirs)
        pairs = [(loss, other[step]) for step, loss in ours if step in other and math.isfinite(loss + other[step])]
        gaps = [loss / reference - 1 for loss, reference in pairs[-max(1, len(pairs) // 4) :] if reference > 0]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) >= 4 else math.inf
        # Losses of single batches vary more than methods do.
        if gaps and (ours is case.run.held_out or abs(statistics.fmean(gaps)) > 3 * error):
            return statistics.fmean(gaps)
    return None


_SYMPTOMS = (_discarded, _withheld, _growing, _low_cosine, _behind)


@rule("error", "whether the loss is finite and falls", "losses")
def diverging(case: Case) -> Iterator[Diagnostic]:
    """Report a loss that is not finite or rises.

    If the loss rises at exchanges between islands, `sync-every-too-long` reports it instead, because the inner learning
    rate is then not the cause.
    """
    found = _not_finite(case) or (risen(case) if rise_at_exchanges(case) is None else None)
    if found is None:
        return
    began, what, figures = found
    yield case.finding(
        f"The loss {what}, starting at step {began}",
        "Halve the learning rate, or lengthen its warmup. If an uncompressed run with the same learning rate is "
        "stable, send more of the gradient instead.",
        steps=(began, case.run.losses[-1][0]),
        patch=case.patch(slower),
        evidence={"first symptom at step": began, **figures, **_events_around(case, began)},
    )


def _not_finite(case: Case) -> tuple[int, str, dict[str, Any]] | None:
    """Return the first step of the trailing losses that are not finite, a text and figures; None if the last one is."""
    losses, end = case.run.losses, len(case.run.losses)
    while end and not math.isfinite(losses[end - 1][1]):
        end -= 1
    if end == len(losses):
        return None
    return losses[end][0], "is not finite", {"last finite loss": losses[end - 1][1]} if end else {}


def risen(case: Case) -> tuple[int, str, dict[str, Any]] | None:
    """Return the step from which the loss rises for good, a text and figures, or None if it does not.

    Losses are compared as means over windows of a tenth of their number. In a long run, windows do not begin at every
    step, which would take minutes.
    """
    points = [(step, loss) for step, loss in case.run.losses if math.isfinite(loss)]
    if len(points) < case.limits.lines:
        return None
    losses, window = [loss for _, loss in points], max(1, len(points) // 10)
    ends = range(len(losses), window - 1, -max(1, window // 20))[::-1]
    means = [statistics.fmean(losses[end - window : end]) for end in ends]
    lowest, limits = min(range(len(means)), key=means.__getitem__), case.limits
    rise, error = means[-1] - means[lowest], _noise(losses) * math.sqrt(2 / window)
    if rise <= max(limits.rise * means[lowest], limits.sigmas * error, limits.lost * (means[0] - means[lowest])):
        return None
    began = max(index for index in range(lowest, len(means)) if means[index] <= means[lowest] + rise / 4)
    what = f"rises from {means[lowest]:.4g} to {means[-1]:.4g}"
    at = points[ends[lowest] - 1][0]
    figures = {"lowest loss": means[lowest], "at step": at, "loss at the end": means[-1]}
    return points[ends[min(began + 1, len(means) - 1)] - 1][0], what, figures


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a value around the trend, estimated from the median step between neighbors."""
    return (
        statistics.median(abs(after - before) for before, after in pairwise(values)) / _MAD_TO_DEVIATION / math.sqrt(2)
    )


@dataclass(frozen=True)
class Rise:
    """Rise of the loss at exchanges between islands.

    Attributes:
        mean: Mean rise of the loss from the step before an exchange to the step after it.
        before: Median loss before the exchanges.
        exchanges: Number of exchanges considered.
    """

    mean: float
    before: float
    exchanges: int


def after_exchanges(case: Case) -> list[int]:
    """Return the measured steps that follow an exchange. The bytes of the exchange are counted in these steps."""
    return [line["step"] for line in case.run.steps if line.get("bytes_islands")]


def rise_at_exchanges(case: Case) -> Rise | None:
    """Return the rise of the loss at exchanges, or None if there are too few exchanges or the rise is within the noise.

    Only the later half of the exchanges is considered, because early in training every exchange improves the loss.
    """
    losses = dict(case.run.losses)
    pairs = [(losses[step - 1], losses[step]) for step in after_exchanges(case) if {step - 1, step} <= losses.keys()]
    pairs = [(before, after) for before, after in pairs if math.isfinite(after - before)]
    late = pairs[len(pairs) // 2 :]
    if len(late) < SAMPLES:
        return None
    rises = [after - before for before, after in late]
    found = Rise(statistics.fmean(rises), statistics.median(before for before, _ in late), len(rises))
    # The noise of all losses would be too large an estimate, since it includes the fall of the loss after each
    # exchange.
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    least = max(case.limits.rise * found.before, case.limits.sigmas * error)
    return found if found.mean >= least else None


def _events_around(case: Case, began: int) -> dict[str, Any]:
    """Return the events nearest to step `began`, in order of steps."""
    nearest = sorted(case.run.events or (), key=lambda event: abs(event["step"] - began))[:_NEAR]
    nearest.sort(key=lambda event: event["step"])
    shown = [f"step {event['step']}: {event['kind']}, {event.get('reason', '')}" for event in nearest]
    return {"events nearby": shown} if shown else {}


_SHOWN = 5
_BOUNDS = ("exploding", "loss_spike", "residual_growth")
"""Bounds of the guard that are tight if they are below their defaults."""


@rule("warning", "how often the guard fired, and whether the settings returned", "events")
def guard_fires_often(case: Case) -> Iterator[Diagnostic]:
    """Report anomalies so frequent that settings cannot return between two of them, or settings that never returned.

    Anomalies in the dense steps at the start are ignored, because compression does not cause them.
    """
    dense = case.section.schedule.warmup_steps
    found = [event for event in case.run.events or () if event["kind"] == "anomaly" and event["step"] > dense]
    not_finite = ("finite", "nan", "inf ")
    anomalies = [one for one in found if not any(word in str(one.get("reason", "")).lower() for word in not_finite)]
    if len(anomalies) < case.limits.anomalies:
        return
    first, last = anomalies[0]["step"], case.run.steps[-1]["step"]
    between, away = (last - first + 1) / len(anomalies), _away(case, first)
    if between > _cooldown(case) and away < 0.5:
        return
    yield case.finding(
        f"The guard fires every {between:.0f} steps, and since the first time, the chosen settings have not been in "
        f"force for {away:.0%} of the steps",
        *_calmer(case),
        steps=(first, anomalies[-1]["step"]),
        evidence={
            "anomalies": len(anomalies),
            "part of the steps since then without the settings": away,
            "reasons": [f"step {event['step']}: {event.get('reason', '')}" for event in anomalies[:_SHOWN]],
        },
        weight=max(away, min(1.0, _cooldown(case) / between / 2)),
    )


def _away(case: Case, first: int) -> float:
    """Return the fraction of the measured steps from `first` on in which the chosen settings were not in force."""
    since = [line for line in case.run.steps if line["step"] >= first]
    if case.run.section is None or not since:
        return 0.0
    wanted = brief(case.section.gradients)
    return sum(bool(line.get("settings", wanted) != wanted) for line in since) / len(since)


def _cooldown(case: Case) -> int:
    """Return the number of steps without an anomaly after which the guard moves back one level."""
    return (case.section.guard or Guard()).cooldown_steps


def _calmer(case: Case) -> tuple[str, Mapping[str, Any] | None]:
    """Return a remedy and its patch: default bounds if tighter ones are set, otherwise softer gradient settings."""
    written, usual = (case.section.guard or Guard()).model_dump(), Guard().model_dump()
    tight = [key for key in _BOUNDS if written[key] < usual[key]]
    if case.run.config is not None and tight:
        keys = ", ".join(f"guard.{key}" for key in tight)
        what = f"Leave out {keys}: with the defaults, no healthy run has anomalies."
        return what, case.patch(with_section, {"guard": dict.fromkeys(tight)})
    what = "Send more of the gradient. If gradients also explode without compression, lower the learning rate."
    return what, case.gradients_patch(softer(case.section.gradients))


@rule("warning", "how many steps were skipped", "events|grad_norm")
def skipped_steps(case: Case) -> Iterator[Diagnostic]:
    steps, late = _skipped_steps(case), case.run.steps[-1]["step"] - case.limits.skipped_from
    share = len(steps) / late if late > 0 else 0.0
    if share <= case.limits.skipped or len(steps) < case.limits.anomalies:
        return
    yield case.finding(
        f"{share:.0%} of the steps were skipped, because their gradients were not finite",
        *_finite_again(case),
        steps=(steps[0], steps[-1]),
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
