"""Successive halving: which candidates go on to a longer trial, and which one is the best. Pure functions.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016): a budget is spent
on short trials of all, and on longer ones of the best third. Here a trial is good when it is fast, as long as its loss
stays by the one of uncompressed training at equal steps.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from deepspeed_compress.tools.tune.space import BASELINE

__all__ = [
    "METRICS",
    "Result",
    "Round",
    "Rung",
    "best",
    "loss_gap",
    "make_rungs",
    "promoted",
    "reasons",
    "reserve",
    "trials_left",
]

FACTOR = 3
"""So many times the steps in the next rung, for one in so many candidates, but two at least."""
NARROWING = 2.0
"""So many times the loss gap in the rung before: gaps are larger early in training."""
SLACK = 0.02
"""How much slower than uncompressed a candidate may look, for each rung that is to come: short trials are noisy."""


@dataclass(frozen=True)
class Rung:
    """Trials of `steps` optimizer steps. `gap`, `slack`: how far loss and metric may be above the baseline's."""

    number: int
    steps: int
    gap: float
    slack: float


@dataclass(frozen=True)
class Result:
    """What a trial came to; figures are nan when it did not finish.

    `loss`: mean over the last part; `step_ms`: median; `bytes`: mean that one rank sends in a step, of all kinds;
    `cosine`: between decoded and true gradients, None when not sampled; `seconds`: of the whole trial. `error`: why it
    failed; `tail`: the last lines of its log.
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
    """A rung, and the results by name of what was tried in it."""

    rung: Rung
    results: Mapping[str, Result]

    @property
    def baseline(self) -> Result | None:
        """Of uncompressed training, if it finished."""
        found = self.results.get(BASELINE)
        return found if found is not None and found.finished else None


METRICS: Mapping[str, Callable[[Result], float]] = MappingProxyType(
    {"step_time": lambda result: result.step_ms, "bytes": lambda result: result.bytes}
)
"""What is to be small, by the name that --metric gives it."""


def make_rungs(steps: int, count: int, target: float) -> list[Rung]:
    """`count` rungs: the first of `steps`, the last with the loss gap `target` and without slack."""
    left = range(count - 1, -1, -1)
    return [
        Rung(index + 1, steps * FACTOR**index, target * NARROWING**later, SLACK * later)
        for index, later in enumerate(left)
    ]


def trials_left(candidates: int, rungs: Sequence[Rung]) -> list[tuple[Rung, int]]:
    """How many trials each of `rungs` has at most, the baseline's among them, from `candidates` without it."""
    counts: list[tuple[Rung, int]] = []
    for rung in rungs:
        counts.append((rung, candidates + 1))
        candidates = _kept(candidates)
    return counts


def _kept(candidates: int) -> int:
    return min(candidates, max(2, math.ceil(candidates / FACTOR)))


def loss_gap(result: Result, baseline: Result) -> float:
    """How far the loss is above the baseline's, as a fraction of it; infinite where a loss is not finite."""
    gap = (result.loss - baseline.loss) / abs(baseline.loss) if baseline.loss else math.inf
    return gap if math.isfinite(gap) else math.inf


def reasons(found: Round, metric: str) -> dict[str, str]:
    """Why each candidate of `found` does not go on, "" for those that do, in the order of the metric.

    Out are what failed, what is beyond the loss gap or slower than the baseline, what another one dominates, and of
    the rest all but the best third. The baseline has finished.
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
    """The candidates that go on, best first."""
    kept = [name for name, reason in reasons(found, metric).items() if not reason]
    return sorted(kept, key=lambda name: METRICS[metric](found.results[name]))


def reserve(rounds: Sequence[Round], tried: Collection[str], metric: str) -> list[str]:
    """Candidates that had no fault in `rounds`, only no place, best first: a third of those that are not in `tried`.

    Short trials promote what sends least, and that may be just what loses in longer ones.
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
    """Whether another one is nowhere worse and somewhere better."""
    own = _figures(result, baseline)
    for other in others:
        theirs = _figures(other, baseline)
        if theirs != own and all(a <= b for a, b in zip(theirs, own, strict=True)):
            return f"{other.name} is as good in everything"
    return ""


def _figures(result: Result, baseline: Result) -> tuple[float, float, float]:
    return result.step_ms, result.bytes, loss_gap(result, baseline)


def best(rounds: Sequence[Round], target: float, metric: str) -> tuple[Round, Result] | None:
    """The best by `metric` of what is within `target` and better than the baseline, with the round that shows it.

    The longest trials count: who fails there is not taken for what shorter ones say. None when nothing is better.
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
