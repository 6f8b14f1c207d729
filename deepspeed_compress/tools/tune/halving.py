"""Successive halving: choose the candidates for longer trials, and finally the best one. Pure functions.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016): a budget is spent
on short trials of all candidates and on longer trials of the best third. Here, a trial is good if it is fast and its
loss stays close to that of uncompressed training after the same number of steps.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_compress.tools.tune.space import BASELINE

FACTOR = 3
"""Factor between the steps of consecutive rungs. One in as many candidates is promoted, but at least two."""
NARROWING = 2.0
"""Factor between the allowed loss gaps of consecutive rungs. Gaps are larger early in training."""
SLACK = 0.02
"""Fraction by which a candidate may appear slower than the baseline, per remaining rung. Short trials are noisy."""


@dataclass(frozen=True)
class Rung:
    """Trials of equal length.

    Attributes:
        number: Number of the rung, from 1.
        steps: Optimizer steps of each trial.
        gap: Largest allowed loss gap to the baseline, as a fraction.
        slack: Fraction by which the metric may be above the baseline's.
    """

    number: int
    steps: int
    gap: float
    slack: float


@dataclass(frozen=True)
class Result:
    """Result of a trial. Figures are NaN if it did not finish.

    Attributes:
        name: Name of the candidate.
        status: Whether the trial finished, failed, or was stopped because time was up.
        loss: Mean loss over the last part of the steps.
        step_ms: Median milliseconds per step.
        bytes: Mean bytes of all kinds that one rank sends per step.
        cosine: Mean cosine between decoded and true gradients, or None if it was not sampled.
        seconds: Duration of the whole trial.
        error: Reason for a failure.
        tail: Last lines of the log.
    """

    name: str
    status: Literal["finished", "failed", "stopped"]
    loss: float = math.nan
    step_ms: float = math.nan
    bytes: float = math.nan
    cosine: float | None = None
    seconds: float = 0.0
    error: str = ""
    tail: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True)
class Round:
    """Rung with the results of its trials, by name of the candidate."""

    rung: Rung
    results: Mapping[str, Result]

    @property
    def baseline(self) -> Result | None:
        """Return the result of uncompressed training, or None if it did not finish."""
        found = self.results.get(BASELINE)
        return found if found is not None and found.finished else None


METRICS: Mapping[str, Callable[[Result], float]] = {
    "step_time": lambda result: result.step_ms,
    "bytes": lambda result: result.bytes,
}
"""Functions of a result to minimize, by the value of --metric."""


def make_rungs(steps: int, count: int, target: float) -> list[Rung]:
    """Return `count` rungs. The first has `steps` steps, and the last has the loss gap `target` and no slack."""
    left = range(count - 1, -1, -1)
    return [
        Rung(index + 1, steps * FACTOR**index, target * NARROWING**later, SLACK * later)
        for index, later in enumerate(left)
    ]


def _kept(candidates: int) -> int:
    return min(candidates, max(2, math.ceil(candidates / FACTOR)))


def loss_gap(result: Result, baseline: Result) -> float:
    """Return the loss above the baseline's as a fraction of the latter, or infinity if a loss is not finite."""
    gap = (result.loss - baseline.loss) / abs(baseline.loss) if baseline.loss else math.inf
    return gap if math.isfinite(gap) else math.inf


def reasons(found: Round, metric: str) -> dict[str, str]:
    """Return for each candidate of `found` why it is not promoted, or "" if it is.

    Candidates are dropped if they failed, exceed the loss gap, are worse than the baseline by `metric`, or are
    dominated by another one. Of the rest, all but the best third by `metric` are dropped. The baseline must have
    finished.
    """
    baseline = found.baseline
    assert baseline is not None, "a rung is judged against its baseline"
    tried = [result for name, result in found.results.items() if name != BASELINE]
    out = {result.name: _own_fault(result, baseline, found.rung, metric) for result in tried}
    good = [result for result in tried if not out[result.name]]
    out |= {result.name: _dominated(result, good, baseline) for result in good}
    ranked = sorted((result for result in good if not out[result.name]), key=METRICS[metric])
    places = _kept(len(tried))
    return out | {result.name: f"not among the best {places}" for result in ranked[places:]}


def promoted(found: Round, metric: str) -> list[str]:
    """Return the promoted candidates, best first."""
    kept = [name for name, reason in reasons(found, metric).items() if not reason]
    return sorted(kept, key=lambda name: METRICS[metric](found.results[name]))


def reserve(rounds: Sequence[Round], tried: Collection[str], metric: str) -> list[str]:
    """Return a third of the candidates that were dropped from `rounds` only for lack of places, best first.

    Short trials promote the candidates that send least, and these may lose in longer trials. Candidates in `tried` are
    left out.
    """
    waiting: list[str] = []
    for found in reversed(rounds):
        baseline = found.baseline
        assert baseline is not None, "a rung is judged against its baseline"
        fresh = [result for name, result in found.results.items() if name not in (BASELINE, *tried, *waiting)]
        good = [result for result in fresh if not _own_fault(result, baseline, found.rung, metric)]
        waiting += [result.name for result in sorted(good, key=METRICS[metric])]
        tried = {*tried, *found.results}
    return waiting[: _kept(len(waiting))]


def _own_fault(result: Result, baseline: Result, rung: Rung, metric: str) -> str:
    if not result.finished:
        return result.status
    gap, measure = loss_gap(result, baseline), METRICS[metric]
    if gap > rung.gap:
        return f"loss gap {gap:+.2%} is above {rung.gap:.2%}"
    if measure(result) > measure(baseline) * (1 + rung.slack):
        return f"{measure(result) / measure(baseline):.2f} times the {metric} of uncompressed training"
    return ""


def _dominated(result: Result, others: Iterable[Result], baseline: Result) -> str:
    """Return which candidate is at least as good in all figures and better in one, or "" if there is none."""
    own = _figures(result, baseline)
    for other in others:
        theirs = _figures(other, baseline)
        if theirs != own and all(a <= b for a, b in zip(theirs, own, strict=True)):
            return f"{other.name} is as good in everything"
    return ""


def _figures(result: Result, baseline: Result) -> tuple[float, float, float]:
    return result.step_ms, result.bytes, loss_gap(result, baseline)


def best(rounds: Sequence[Round], target: float, metric: str) -> tuple[Round, Result] | None:
    """Return the best result by `metric` within the loss gap `target` and better than the baseline, with its round.

    Longer trials take precedence: a candidate that fails in one is not chosen for its result in a shorter one. Returns
    None if nothing is better than the baseline.
    """
    measure, lost = METRICS[metric], set[str]()
    for found in reversed(rounds):
        baseline = found.baseline
        tried = [result for name, result in found.results.items() if name != BASELINE and result.status != "stopped"]
        good = [
            result
            for result in tried
            if baseline is not None
            and result.name not in lost
            and result.finished
            and loss_gap(result, baseline) <= target
            and measure(result) < measure(baseline)
        ]
        if good:
            return found, min(good, key=measure)
        lost |= {result.name for result in tried}
    return None
