"""Compare the time that runs take to a held-out loss that all of them reach, in a table and a picture.

Only the seconds of training steps count, without evaluations, startup and the first step, which is slower. The loss is
interpolated between evaluations. Bytes are those that one rank sends per step, as the monitor counts them.

examples:
  python -m deepspeed_compress.tools.time_to_loss runs/uncompressed runs/int4
  python -m deepspeed_compress.tools.time_to_loss runs/uncompressed runs/int4 --title "100 Mbit/s" --picture loss.png
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.monitor import KINDS
from deepspeed_compress.tools import tables
from deepspeed_compress.tools.plots import COLOURS, GREY, check_plotting, new_figure, save_figure, style_axes
from deepspeed_compress.tools.run_directory import Line, read_metrics, read_summary

Point = tuple[float, float]
"""Seconds of training, and the held-out loss at that time."""
INK = "#1f2328"


@dataclass(frozen=True)
class TimedRun:
    """Finished run. `sent` is the number of bytes that one rank sends per step, or None if they were not counted."""

    name: str
    points: tuple[Point, ...]
    step_seconds: float
    sent: float | None


def read_run(directory: Path) -> TimedRun:
    """Read the finished run in `directory`.

    Raises:
        DataError: The run is not finished or was never evaluated.
    """
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
    """Return a point for every evaluation in lines of metrics.jsonl.

    A training line contains the mean time of the steps since the previous line.
    """
    seconds, last, found = 0.0, 0, []
    for line in lines:
        if line.get("step_time_s") is not None:
            seconds += line["step_time_s"] * (line["step"] - last) if line["step"] > 1 else 0.0
            last = line["step"]
        if line.get("eval_loss") is not None:
            found.append((seconds, line["eval_loss"]))
    return found


def time_to(goal: float, points: Iterable[Point]) -> float | None:
    """Return the seconds until the loss reaches `goal`, or None if it never does."""
    before: Point | None = None
    for seconds, loss in points:
        if loss <= goal:
            if before is None or before[1] == loss:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = (seconds, loss)
    return None


def common_goal(runs: Iterable[TimedRun]) -> float:
    """Return the lowest loss that all runs reach."""
    return max(min(loss for _, loss in run.points) for run in runs)


def _times(runs: Sequence[TimedRun]) -> list[float]:
    goal = common_goal(runs)
    return [seconds for run in runs if (seconds := time_to(goal, run.points)) is not None]


def print_table(runs: Sequence[TimedRun], title: str) -> None:
    """Print a table of the runs. The last column compares each with the first one."""
    heads = ("last loss", "ms a step", "MB sent a step", f"seconds to {common_goal(runs):.3f}", "times as fast")
    times = _times(runs)
    rows = []
    for run, seconds in zip(runs, times, strict=True):
        figures = (f"{run.points[-1][1]:.3f}", f"{1e3 * run.step_seconds:,.0f}", shown(run.sent, ".2f", 1e-6))
        rows.append((run.name, *figures, f"{seconds:.1f}", f"{times[0] / seconds:.1f}"))
    tables.print_table(title, ("run", *heads), rows, ("run",))


def draw(runs: Sequence[TimedRun], title: str, file: Path) -> None:
    """Plot the losses over time as a PNG, and the time at which each run reaches the lowest loss common to all.

    The first run is the reference for the others.
    """
    figure, times, goal = new_figure(8, 4.2), _times(runs), common_goal(runs)
    axes = figure.add_subplot()
    axes.axhline(goal, color=INK, linewidth=0.8, linestyle=":")
    for run, seconds, colour in zip(runs, times, itertools.cycle((GREY, *COLOURS))):
        gain = "" if seconds == times[0] else f", {times[0] / seconds:.1f} times as fast"
        label = f"{run.name}: {seconds:.0f} s{gain}"
        axes.plot(*zip(*run.points, strict=True), color=colour, label=label, linewidth=2.2)
        axes.plot(seconds, goal, "o", color=colour, markersize=8, markeredgecolor="white")
    # The horizontal axis ends soon after the last run reaches the goal.
    axes.set_xlim(0, 1.12 * max(times))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss")
    style_axes(axes, title)
    axes.legend(frameon=False, title="to the dotted line", alignment="left")
    save_figure(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="DIR", help="finished runs; the first one is the baseline"
    )
    parser.add_argument("--title", default="time to the same loss", help="title of the table and the picture")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses over time into this PNG")
    options = parser.parse_args()
    try:
        runs = [read_run(directory) for directory in options.runs]
        print_table(runs, options.title)
        if options.picture:
            check_plotting("--picture", options.picture)
            draw(runs, options.title, options.picture)
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
