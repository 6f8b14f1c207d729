"""Search by successive halving.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016): a budget is spent
on short trials of all candidates and on longer trials of the best third. Here, a trial is good if it is fast and its
loss stays close to that of uncompressed training after the same number of steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepspeed_compress.tools.tune.space import BASELINE, Candidate
from deepspeed_compress.tools.tune.trials import LOG, Result, Rung, Trials

FACTOR = 3
"""Factor between the steps of consecutive rungs. One in as many candidates is promoted, but at least two."""
NARROWING = 2.0
"""Factor between the allowed loss gaps of consecutive rungs. Gaps are larger early in training."""
SLACK = 0.02
"""Fraction by which a candidate may appear slower than the baseline, per remaining rung. Short trials are noisy."""


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
    places = max(2, math.ceil(len(tried) / FACTOR))
    return out | {result.name: f"not among the best {places}" for result in ranked[places:]}


def promoted(found: Round, metric: str) -> list[str]:
    """Return the promoted candidates, best first."""
    kept = [name for name, reason in reasons(found, metric).items() if not reason]
    return sorted(kept, key=lambda name: METRICS[metric](found.results[name]))


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


AS_LONG, STARTUP = 3.0, 60.0
"""Longest trial relative to the baseline's, and seconds added to it. A candidate that slow is no gain."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a search.

    Attributes:
        rounds: Rounds that were held. The last one may be incomplete.
        stopped: Reason for an early end, or "".
        failure: Trial of the baseline, if it failed.
    """

    rounds: tuple[Round, ...]
    stopped: str = ""
    failure: Result | None = None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def search(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    trials: Trials,
    metric: str,
    left: Callable[[], float],
    say: Callable[[str], None],
) -> Outcome:
    """Try all `candidates`, baseline first, in the first of `rungs`, and the promoted ones in each further rung.

    The search ends if no candidate remains, if time is up (the running trial is then ended), or if the baseline fails,
    because nothing can be compared without it. `left` returns the seconds that are left, and `say` receives a line
    before and after each trial.
    """
    known = {candidate.name: candidate for candidate in candidates}
    names, rounds = list(known), list[Round]()
    for rung in rungs:
        tried = _trials([known[name] for name in names], rung, trials, left, say)
        results = {result.name: result for result in tried}
        if results:
            rounds.append(Round(rung, results))
        stopped = _stopped(results, names, rung)
        if stopped is not None:
            return Outcome(tuple(rounds), *stopped)
        names = [BASELINE, *promoted(rounds[-1], metric)]
        if len(names) == 1:
            break
    return Outcome(tuple(rounds))


def _trials(
    candidates: Sequence[Candidate],
    rung: Rung,
    trials: Trials,
    left: Callable[[], float],
    say: Callable[[str], None],
) -> Iterator[Result]:
    """Yield results in order until the baseline fails or time is up."""
    baseline: Result | None = None
    for candidate in candidates:
        found = trials.find(candidate, rung)
        if found is None and left() <= 0:
            return
        limit = "" if math.isinf(left()) else f", {_duration(max(0, left()))} left"
        log = trials.directory(candidate, rung) / LOG
        say(f"rung {rung.number}: {candidate.name}, {rung.steps} steps{limit}, log {log}")
        longest = math.inf if baseline is None else AS_LONG * baseline.seconds + STARTUP
        result = found or trials.run(candidate, rung, min(longest, left()))
        if result.status == "stopped" and left() > 0:
            # It was stopped for its own slowness.
            slow = f"took more than {AS_LONG:g} times as long as uncompressed training"
            result = replace(result, status="failed", error=slow)
        figures = f"{result.step_ms:9,.1f} ms a step, loss {result.loss:.4f}{', from before' if found else ''}"
        say(f"  {result.name:<22}{figures if result.finished else f'{result.status}: {result.error}'}")
        yield result
        baseline = result if candidate.name == BASELINE else baseline
        if result.status == "stopped" or (baseline is not None and not baseline.finished):
            return


def _stopped(results: Mapping[str, Result], names: Sequence[str], rung: Rung) -> tuple[str, Result | None] | None:
    """Return why the search ends with this rung and the failed baseline, if any; None if all trials were made."""
    baseline = results.get(BASELINE)
    if baseline is not None and baseline.status == "failed":
        return f"uncompressed training failed in rung {rung.number}", baseline
    if not results.keys() >= set(names) or any(result.status == "stopped" for result in results.values()):
        return f"the time budget was used up in rung {rung.number}", None
    return None
