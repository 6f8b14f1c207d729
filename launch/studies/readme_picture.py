#!/usr/bin/env python3
"""Draw the picture of the README: losses over minutes of training at 100 Mbit/s.

The runs are those of DDP, DDP with PowerSGD, and this package.

`readme_picture.json` holds the curves of seed 0 that `time_to_loss` trained, and the median seconds of a step that
`bench step` measured (docs/results.md, "Time to a loss" and "Step time"). To replace the curves, name the directory of
your runs with --runs.

examples, from the root of the repository:
  python -m launch.studies.readme_picture
  python -m launch.studies.readme_picture --runs runs/time_to_loss/2hosts/seed0
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.tools.plots import new_figure, save_figure
from deepspeed_compress.tools.time_to_loss import time_to
from launch.studies.harness import new_parser

DATA = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parents[2] / "docs" / "time-to-loss.png"
COLORS = ("#6e7781", "#bc4c00", "#0969da")
INK = "#1f2328"

Line = dict[str, Any]
"""`label`, `run` (file of the curve), seconds of a step (`step_s`, after `dense_steps` of `dense_s`), `held_out`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture, after reading new curves if --runs is given."""
    parser = new_parser(__doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="read the curves of these runs first")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE.png", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    lines: list[Line] = json.loads(DATA.read_text(encoding="utf-8"))
    if options.runs:
        lines = [line | {"held_out": _held_out(options.runs / f"{line['run']}.json")} for line in lines]
        DATA.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8")
    draw(lines, options.output)
    return 0


def _held_out(file: Path) -> list[list[float]]:
    found = json.loads(file.read_text(encoding="utf-8"))["held_out"]
    return [[step, round(loss, 4)] for step, loss in found]


def points(line: Line) -> list[tuple[float, float]]:
    """Return minutes of training and the held-out loss at each evaluation."""
    return [(_seconds(line, step) / 60, loss) for step, loss in line["held_out"]]


def _seconds(line: Line, step: float) -> float:
    dense = min(step, line["dense_steps"])
    return float(dense * line["dense_s"] + (step - dense) * line["step_s"])


def draw(lines: Sequence[Line], file: Path) -> None:
    """Plot the losses until each line reaches the last loss of the first one, and mark that time."""
    goal = lines[0]["held_out"][-1][1]
    figure = new_figure(8, 5.6)
    axes = figure.add_subplot()
    for line, color in zip(lines, COLORS, strict=True):
        _draw_line(axes, line, goal, color)
    axes.axhline(goal, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel("minutes of training", fontsize=20)
    axes.set_ylabel("loss", fontsize=20)
    axes.set_xlim(0, 20)
    axes.set_xticks(range(0, 21, 5))
    axes.set_title("two hosts, 100 Mbit/s", fontsize=20)
    axes.tick_params(labelsize=17)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=19, loc="upper right", title="time to the same loss", title_fontsize=19)
    save_figure(figure, file)


def _draw_line(axes: Any, line: Line, goal: float, color: str) -> None:
    minutes = time_to(goal, points(line))
    assert minutes is not None, f"{line['label']} does not reach the loss of the first line"
    before = [point for point in points(line) if point[0] < minutes]
    label = f"{line['label']}: {minutes:.1f} min" if minutes < 10 else f"{line['label']}: {minutes:.0f} min"
    axes.plot(*zip(*before, (minutes, goal), strict=True), color=color, linewidth=3.5, label=label)
    axes.plot(minutes, goal, "o", color=color, markersize=13, markeredgecolor="white")


if __name__ == "__main__":
    sys.exit(main())
