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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.monitor import KINDS
from deepspeed_compress.tools import tables
from deepspeed_compress.tools.plots import check_plotting, new_figure, plain_decades, save_figure, style_axes
from deepspeed_compress.tools.run_directory import Line, read_metrics, read_summary

Point = tuple[float, float]
"""Seconds of training, and the held-out loss at that time."""
COLOURS = ("#8c959f", "#1f6feb", "#2da44e", "#8250df", "#e16f24", "#cf222e", "#bf3989", "#1b7c83", "#9a6700", "#57606a")
"""Colors of the runs. The first run is the reference for the others."""
INK = "#1f2328"
_MANY_RUNS, _LEGEND_OUTSIDE = 6, MappingProxyType({"fontsize": 8, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)})
"""Number of runs above which the legend would cover the lines, and its placement outside the axes then."""


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
    """Plot the losses over time as a PNG, and the time at which each run reaches the lowest loss common to all."""
    draw_panels({title: runs}, common_goal(runs), file)


def draw_panels(
    panels: Mapping[str, Sequence[TimedRun]],
    goal: float,
    file: Path,
    dashed: Collection[str] = (),
    logarithmic: bool = False,
) -> None:
    """Plot losses over time as a PNG: one panel per title, with the time at which each run reaches `goal`, if it does.

    The first run of a panel is the reference for the others. Runs named in `dashed` have dashed lines.
    """
    figure = new_figure(8, 4.2 * len(panels))
    for number, (title, runs) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, number)
        _draw_runs(axes, runs, goal, dashed)
        _limit(axes, runs, goal, logarithmic)
        style_axes(axes, title)
        place: dict[str, Any] = dict(_LEGEND_OUTSIDE) if len(runs) > _MANY_RUNS else {}
        axes.legend(frameon=False, title="to the dotted line", alignment="left", **place)
    save_figure(figure, file)


def _draw_runs(axes: Any, runs: Sequence[TimedRun], goal: float, dashed: Collection[str]) -> None:
    axes.axhline(goal, color=INK, linewidth=0.8, linestyle=":")
    times = [time_to(goal, run.points) for run in runs]
    for run, seconds, colour in zip(runs, times, itertools.cycle(COLOURS)):
        style = {"linewidth": 1.4, "linestyle": "--"} if run.name in dashed else {"linewidth": 2.2}
        axes.plot(*zip(*run.points, strict=True), color=colour, label=_label(run.name, seconds, times[0]), **style)
        if seconds is not None:
            axes.plot(seconds, goal, "o", color=colour, markersize=8, markeredgecolor="white")


def _label(name: str, seconds: float | None, first: float | None) -> str:
    if seconds is None:
        return f"{name}: not reached"
    gain = "" if first is None or seconds == first else f", {first / seconds:.1f} times as fast"
    return f"{name}: {seconds:.0f} s{gain}"


def _limit(axes: Any, runs: Sequence[TimedRun], goal: float, logarithmic: bool) -> None:
    """End the horizontal axis soon after the last run reaches the goal."""
    last = 1.12 * max(time_to(goal, run.points) or 0.0 for run in runs)
    if logarithmic:
        plain_decades(axes, (min(run.points[0][0] for run in runs), last))
    else:
        axes.set_xlim(0, last)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss")


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
