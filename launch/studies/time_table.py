"""Results of `time_to_loss` from curves and step times: seconds to the goal, and tables."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_compress.safe_files import write_json, write_text
from deepspeed_compress.tools.bench.jobs import Row
from deepspeed_compress.tools.bench.links import UNLIMITED, bits_per_second
from deepspeed_compress.tools.bench.workload import DEEPSPEED, stage_of
from deepspeed_compress.tools.time_to_loss import time_to
from launch.studies.harness import markdown
from launch.studies.loss_curve import Curve, Goal

BASELINE = "ddp"
UNCOMPRESSED = (*(f"{DEEPSPEED}, ZeRO {stage}" for stage in range(4)), "fsdp2")
"""Engines that have the losses of DDP."""


@dataclass(frozen=True)
class Trained:
    """Curve of a finished run."""

    name: str
    hosts: int
    seed: int
    curve: Curve


def goal_of(baseline: Curve, window: int) -> Goal:
    """Return the last losses of the baseline, with the training loss as a mean over `window` steps."""
    return Goal(baseline.held_out[-1][1], baseline.smoothed(window)[-1][1])


@dataclass(frozen=True)
class Timed:
    """Seconds per step, after `dense_steps` of `dense` seconds, and the bytes that a host sends per step if counted."""

    step: float
    dense: float
    dense_steps: int
    sent: float | None

    def at(self, step: float) -> float:
        """Return the seconds of the first `step` steps."""
        first = min(step, self.dense_steps)
        return first * self.dense + (step - first) * self.step


class StepTimes:
    """Rows of `bench step` by name, hosts and rate. Rows of later documents replace those of earlier ones."""

    def __init__(self, documents: Iterable[Row] = ()) -> None:
        rows = [row for document in documents for row in document["rows"] if row["rate"] is not None]
        self._rows = {(_name(row), row["ranks"], row["rate"]): row for row in rows}

    def rates(self, hosts: int) -> list[str]:
        """Return the measured rates, slowest last."""
        rates = {rate for _, ranks, rate in self._rows if ranks == hosts}
        return sorted(rates, key=bits_per_second, reverse=True)

    def of(self, name: str, hosts: int, rate: str, dense_steps: int) -> Timed | None:
        """Return the step times, or None if they, or those of its dense first steps, are not measured."""
        row = self._rows.get((name, hosts, rate))
        dense = self._rows.get((_dense(row), hosts, rate)) if row and dense_steps else row
        if row is None or dense is None:
            return None
        return Timed(row["step_s"]["median"], dense["step_s"]["median"], dense_steps, row["bytes"].get("interface"))


def _name(row: Row) -> str:
    contender = row["contender"]
    stage = f", ZeRO {stage_of(contender['ds_config'])}" if contender["kind"] == DEEPSPEED else ""
    return f"{contender['name']}{stage}"


def _dense(row: Row) -> str:
    """Return the name of the engine whose step times stand for the uncompressed first steps of a row."""
    stage = stage_of(row["contender"]["ds_config"])
    return BASELINE if stage is None else f"{DEEPSPEED}, ZeRO {stage}"


@dataclass(frozen=True)
class Outcome:
    """Results of a setting on a number of hosts.

    Attributes:
        name: Name of the setting.
        hosts: Number of hosts.
        last: Last evaluation by seed.
        held_out: Steps to the held-out loss of the goal by seed, or None if it is never reached.
        train: The same for the training loss.
        timed: Step times by rate.
        seconds: Mean seconds to the held-out loss over the seeds, by rate.
    """

    name: str
    hosts: int
    last: Mapping[int, tuple[float, float]]
    held_out: Mapping[int, float | None]
    train: Mapping[int, float | None]
    timed: Mapping[str, Timed]
    seconds: Mapping[str, float]


def outcomes(trained: Sequence[Trained], window: int, times: StepTimes) -> list[Outcome]:
    """Return the outcome of every trained setting. Seeds without a baseline are left out."""
    goals = {(run.hosts, run.seed): goal_of(run.curve, window) for run in trained if run.name == BASELINE}
    settings = dict.fromkeys((run.hosts, run.name) for run in trained)
    found = []
    for hosts, name in settings:
        runs = [run for run in trained if (run.hosts, run.name) == (hosts, name) and (hosts, run.seed) in goals]
        names = (name, *UNCOMPRESSED) if name == BASELINE else (name,)
        found += [_outcome(one, runs, goals, window, times) for one in names if one == name or _has(times, one, hosts)]
    return found


def _has(times: StepTimes, name: str, hosts: int) -> bool:
    return any(times.of(name, hosts, rate, 0) for rate in times.rates(hosts))


def _outcome(
    name: str, runs: Sequence[Trained], goals: Mapping[tuple[int, int], Goal], window: int, times: StepTimes
) -> Outcome:
    hosts, dense = runs[0].hosts, runs[0].curve.dense_steps
    goal = {run.seed: goals[hosts, run.seed] for run in runs}
    held_out = {run.seed: time_to(goal[run.seed].held_out, run.curve.held_out) for run in runs}
    train = {run.seed: time_to(goal[run.seed].train, run.curve.smoothed(window)) for run in runs}
    found = {rate: times.of(name, hosts, rate, dense) for rate in times.rates(hosts)}
    timed = {rate: one for rate, one in found.items() if one is not None}
    reached = [step for step in held_out.values() if step is not None]
    all_reached = len(reached) == len(held_out)
    seconds = {rate: statistics.fmean(map(one.at, reached)) for rate, one in timed.items() if all_reached}
    return Outcome(name, hosts, {run.seed: run.curve.held_out[-1] for run in runs}, held_out, train, timed, seconds)


def table(found: Sequence[Outcome], rates: Sequence[str]) -> str:
    """Return a Markdown table of the outcomes on a number of hosts, sorted by time at the slowest rate."""
    base = next(one for one in found if one.name == BASELINE)
    heads = ["setting", "MB sent", "steps to held-out goal", "steps to training goal"]
    heads += [
        f"{_spoken(rate)}: {what}" for rate in rates for what in ("s per step", "s to the loss", "times as fast as DDP")
    ]
    slowest = rates[-1] if rates else ""
    ordered = sorted(found, key=lambda one: one.seconds.get(slowest, float("inf")))
    return markdown(heads, (_cells(one, base, rates) for one in ordered))


def _spoken(rate: str) -> str:
    return "no limit" if rate == UNLIMITED else rate


def _cells(one: Outcome, base: Outcome, rates: Sequence[str]) -> list[str]:
    sent = next((timed.sent for timed in one.timed.values() if timed.sent is not None), None)
    cells = [one.name, "-" if sent is None else f"{sent / 1e6:.2f}"]
    cells += [_steps(one.held_out, one.last), _steps(one.train, one.last)]
    for rate in rates:
        timed, seconds, of_base = one.timed.get(rate), one.seconds.get(rate), base.seconds.get(rate)
        cells += ["-" if timed is None else f"{timed.step:.3f}", "-" if seconds is None else f"{seconds:.0f}"]
        cells.append("-" if seconds is None or of_base is None else f"{of_base / seconds:.1f}")
    return cells


def _steps(by_seed: Mapping[int, float | None], last: Mapping[int, tuple[float, float]]) -> str:
    """Return "310", or "310 (300 to 325)" for several seeds, or "not in 600" if one does not reach the goal."""
    reached = [step for step in by_seed.values() if step is not None]
    if len(reached) < len(by_seed):
        return f"not in {max(step for step, _ in last.values()):.0f}"
    spread = f" ({min(reached):.0f} to {max(reached):.0f})" if len(reached) > 1 else ""
    return f"{statistics.fmean(reached):.0f}{spread}"


def report(trained: Sequence[Trained], window: int, times: StepTimes, output_dir: Path) -> None:
    """Print the tables, and write them as Markdown and JSON."""
    found = outcomes(trained, window, times)
    hosts = dict.fromkeys(one.hosts for one in found)
    tables = {count: table([one for one in found if one.hosts == count], times.rates(count)) for count in hosts}
    text = "".join(f"\n{count} hosts:\n\n{lines}" for count, lines in tables.items())
    print(text)
    write_text(output_dir / "time_to_loss.md", text)
    write_json(output_dir / "time_to_loss.json", {"outcomes": [asdict(one) for one in found]})
