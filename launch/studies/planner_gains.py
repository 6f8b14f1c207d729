#!/usr/bin/env python3
"""Predict how much faster usual jobs train on usual clusters: what `ds-compress plan cluster` offers, as one picture.

Each figure is the step of what most run now, divided by that of the fastest choice that trains as now. Islands, which
train in another way, are left out. Nodes have eight A100 with 80 GB.

examples, from the root of the repository:
  python -m launch.studies.planner_gains
  python -m launch.studies.planner_gains --jobs "7B, LoRA in ZeRO 3" --gpu 4090 --output gains.png
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.choice_names import INSIDE_NODES, THE_SAME
from deepspeed_compress.planner.choices import Setup, choices
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.gpus import find_gpu
from deepspeed_compress.planner.model import TYPICAL
from deepspeed_compress.planner.search import Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.tools.plots import new_figure, save_figure
from launch.studies.harness import markdown, new_parser, tracked


@dataclass(frozen=True)
class Work:
    """Usual job: a size of model, a program, the least sequences of a step and those of each GPU, and LoRA's rank.

    `now` is what most run now; None for the fastest ZeRO stage that fits.
    """

    size: str
    software: str
    batch: int
    each: int
    rank: int = 0
    now: Setup | None = None


JOBS: Mapping[str, Work] = {
    "1B, pretraining": Work("1B", "deepspeed", 256, 4),
    "7B, all parameters": Work("7B", "hf", 128, 2),
    "7B, LoRA in ZeRO 3": Work("7B", "hf", 128, 2, 16, Setup(3)),
    "13B, all parameters": Work("13B", "hf", 128, 2),
    "70B, all parameters": Work("70B", "hf", 128, 2),
}
NODES = (2, 4, 16)
RATES = (1, 10, 25, 100)
"""Gbit/s of a node."""
LENGTH, PER_PARAMETER = 2048, 20
"""Tokens of a sequence, and of a run for each trained parameter."""
LEAST = 1.1
"""Times as fast from which on a choice is worth its settings."""
COLORS: Mapping[str, str] = {
    "nothing": "#e8e8e8",
    "fewer bits": "#f4a261",
    "inside nodes": "#2a9d8f",
    "another layout": "#8ab6d6",
    "does not fit": "#ffffff",
}
"""Color by what is gained with."""
_MEANINGS: Mapping[str, str] = {
    "nothing": "leave it as it is",
    "fewer bits": f"{THE_SAME}, fewer bits",
    "inside nodes": f"{INSIDE_NODES}, fewer bits",
}
"""Texts of the legend, where they are not the kinds themselves."""


@dataclass(frozen=True)
class Gain:
    """Best choice of a job on a cluster: how it differs from now, and how many times as fast it is."""

    kind: str
    name: str = ""
    times: float = 1.0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Text of a cell."""
        if self.kind == "does not fit":
            return "-"
        return f"{self.times:.0f}" if self.times >= 10 else f"{self.times:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of gains, and draw it if --output is given."""
    options = parse_options(arguments)
    found = {
        name: {(nodes, rate): gain(name, options.gpu, nodes, rate) for nodes in NODES for rate in RATES}
        for name in tracked(options.jobs)
    }
    head = ("", *(f"{nodes} nodes, {rate} Gbit/s" for nodes in NODES for rate in RATES))
    print(markdown(head, [(name, *(one.text for one in gains.values())) for name, gains in found.items()]), end="")
    for name, gains in found.items():
        first = gains[NODES[0], RATES[1]]
        print(
            f"{name}: {first.seconds:.3g} s per step now on {NODES[0]} nodes at {RATES[1]} Gbit/s, then: {first.name}"
        )
    if options.output is not None:
        draw(found, options.output)
    return 0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB", help="(default: all)")
    parser.add_argument("--gpu", default="A100-80", metavar="TYPE", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the gains")
    return parser.parse_args(arguments)


def gain(name: str, gpu: str, nodes: int, rate: float) -> Gain:
    """Return the best choice of a job that trains as now."""
    job = new_job(JOBS[name], gpu, nodes, rate)
    plan = search(job)
    if not plan.candidates:
        return Gain("does not fit")
    now, *others = choices(job, plan, JOBS[name].now)
    fitting = [other for other in others if other.candidate.verdict != "does not fit"]
    best = min(fitting, key=lambda one: one.candidate.days, default=now)
    times = now.candidate.days / best.candidate.days
    if times < LEAST:
        return Gain("nothing", now.name, max(1.0, times), now.seconds)
    kinds = {THE_SAME: "fewer bits", INSIDE_NODES: "inside nodes"}
    kind = next((kind for name, kind in kinds.items() if name in best.name), "another layout")
    return Gain(kind, best.name, times, now.seconds)


def new_job(work: Work, gpu: str, nodes: int, rate: float) -> Job:
    """Return the job on nodes of eight GPUs with cards of `rate` Gbit/s."""
    cluster = Cluster(find_gpu(gpu), 8 * nodes, 8, rate * 1e9 / 8)
    model = replace(TYPICAL[work.size], rank=work.rank)
    batch = max(work.batch, work.each * cluster.gpus)
    tokens = float(PER_PARAMETER * model.trained_parameters)
    return Job(cluster, model, SOFTWARE[work.software], LENGTH, batch, tokens)


def draw(found: Mapping[str, Mapping[tuple[int, int], Gain]], file: Path) -> None:
    """Draw a panel for each job: rows are numbers of nodes, columns rates, and colors say what gains."""
    figure = new_figure(2.2 * len(found) + 0.4, 2.4)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for place, (axes, (name, gains)) in enumerate(zip(panels, found.items(), strict=True)):
        _draw_panel(axes, name, gains)
        if place:
            axes.set_yticks([])
    names = [_MEANINGS.get(kind, kind) for kind in COLORS]
    handles = [_rectangle((0, 0), color) for color in COLORS.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    save_figure(figure, file)


def _draw_panel(axes: Any, name: str, gains: Mapping[tuple[int, int], Gain]) -> None:
    axes.set_xlim(-0.5, len(RATES) - 0.5)
    axes.set_ylim(len(NODES) - 0.5, -0.5)
    for (nodes, rate), one in gains.items():
        column, row = RATES.index(rate), NODES.index(nodes)
        corner = (column - 0.48, row - 0.48)
        axes.add_patch(_rectangle(corner, COLORS[one.kind]))
        axes.text(column, row, one.text, ha="center", va="center", fontsize=10)
    axes.set_xticks(range(len(RATES)), [f"{rate}" for rate in RATES], fontsize=8)
    axes.set_yticks(range(len(NODES)), [f"{nodes} nodes" for nodes in NODES], fontsize=8)
    axes.set_xlabel("Gbit/s of a node", fontsize=8)
    axes.set_title(name, fontsize=9, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _rectangle(corner: tuple[float, float], color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 0.96, 0.96, facecolor=color, edgecolor="#cccccc", linewidth=0.5)


if __name__ == "__main__":
    sys.exit(main())
