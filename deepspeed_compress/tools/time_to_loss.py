"""Runs next to each other: how long each takes to a held-out loss that all of them reach. A table, and a picture.

Seconds are those of training steps, without evaluations, start-up and the first step, which builds what all others use.
Between two evaluations the loss is interpolated. Bytes are what one rank sends in a step, as the monitor counts them.

examples:
  python -m deepspeed_compress.tools.time_to_loss runs/uncompressed runs/int4
  python -m deepspeed_compress.tools.time_to_loss runs/uncompressed runs/int4 --title "100 Mbit/s" --picture loss.png
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.monitor import KINDS
from deepspeed_compress.tools.plots import check_plotting, style_axes
from deepspeed_compress.tools.run_directory import Line, read_metrics, read_summary

__all__ = ["Point", "TimedRun", "common_goal", "curve", "draw", "print_table", "read_run", "time_to"]

Point = tuple[float, float]
"""Seconds of training, and the held-out loss then."""
COLOURS = ("#8c959f", "#1f6feb", "#2da44e", "#8250df", "#e16f24", "#cf222e")
"""The first run is what the others are compared with."""
INK = "#1f2328"


@dataclass(frozen=True)
class TimedRun:
    """A finished run. `sent`: bytes that one rank sends in a step, None where they were not counted."""

    name: str
    points: tuple[Point, ...]
    step_seconds: float
    sent: float | None


def read_run(directory: Path) -> TimedRun:
    """Raises DataError when the run is not finished, or was never evaluated."""
    summary, lines = read_summary(directory), read_metrics(directory)
    points = curve(lines)
    if not points:
        raise DataError(f"{directory}: no held-out loss; train with --eval-every")
    times = [line["step_time_s"] for line in lines if line.get("step_time_s") is not None and line["step"] > 1]
    sent = [summary.get(f"{kind}_per_step") for kind in KINDS]
    return TimedRun(
        directory.resolve().name,
        tuple(points),
        statistics.fmean(times),
        sum(size or 0.0 for size in sent) if any(size is not None for size in sent) else None,
    )


def curve(lines: Iterable[Line]) -> list[Point]:
    """A point at every evaluation, of the lines of metrics.jsonl: a line of training tells the mean of its steps."""
    seconds, last, found = 0.0, 0, []
    for line in lines:
        if line.get("step_time_s") is not None:
            seconds += line["step_time_s"] * (line["step"] - last) if line["step"] > 1 else 0.0
            last = line["step"]
        if line.get("eval_loss") is not None:
            found.append((seconds, line["eval_loss"]))
    return found


def time_to(goal: float, points: Iterable[Point]) -> float | None:
    """Seconds until the loss is `goal`; None if it never is."""
    before: Point | None = None
    for seconds, loss in points:
        if loss <= goal:
            if before is None or before[1] == loss:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = (seconds, loss)
    return None


def common_goal(runs: Iterable[TimedRun]) -> float:
    """The lowest loss that all runs reach."""
    return max(min(loss for _, loss in run.points) for run in runs)


def _times(runs: Sequence[TimedRun]) -> list[float]:
    goal = common_goal(runs)
    return [seconds for run in runs if (seconds := time_to(goal, run.points)) is not None]


def print_table(runs: Sequence[TimedRun], title: str) -> None:
    """The runs on the terminal; the last column compares with the first of them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    heads = ("last loss", "ms a step", "MB sent a step", f"seconds to {common_goal(runs):.3f}", "times as fast")
    table.add_column("run")
    for head in heads:
        table.add_column(head, justify="right")
    times = _times(runs)
    for run, seconds in zip(runs, times, strict=True):
        sent = "-" if run.sent is None else f"{run.sent / 1e6:.2f}"
        figures = (f"{run.points[-1][1]:.3f}", f"{1e3 * run.step_seconds:,.0f}", sent, f"{seconds:.1f}")
        table.add_row(run.name, *figures, f"{times[0] / seconds:.1f}")
    Console().print(table)


def draw(runs: Sequence[TimedRun], title: str, file: Path) -> None:
    """The losses over time, and where each run reaches the goal, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor="white")
    axes, goal, times = figure.add_subplot(), common_goal(runs), _times(runs)
    axes.axhline(goal, color=INK, linewidth=0.8, linestyle=":")
    for run, seconds, colour in zip(runs, times, COLOURS, strict=False):
        gain = "" if run is runs[0] else f", {times[0] / seconds:.1f} times as fast"
        label = f"{run.name}: {seconds:.0f} s{gain}"
        axes.plot(*zip(*run.points, strict=True), color=colour, linewidth=2.2, label=label)
        axes.plot(seconds, goal, "o", color=colour, markersize=8, markeredgecolor="white")
    axes.set_xlim(0, 1.12 * max(times))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss")
    style_axes(axes, title)
    axes.legend(frameon=False, title="to the dotted line", alignment="left")
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="DIR", help="finished runs; the first one is the baseline"
    )
    parser.add_argument("--title", default="time to the same loss", help="of the table and of the picture")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses over time into this PNG")
    options = parser.parse_args()
    try:
        runs = [read_run(directory) for directory in options.runs]
        print_table(runs, options.title)
        if options.picture:
            check_plotting("--picture")
            draw(runs, options.title, options.picture)
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
