"""Compare how often two agents exchange their trunk: in every update, in every tenth, or never.

    python -m launch.studies.agents --output-dir runs/agents --picture docs/agents.png

Finished runs are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deepspeed_compress.tools.plots import COLOURS, check_plotting, style_axes

__all__ = ["SETTINGS", "Run", "draw", "rows"]

SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "every update": ("--exchange-every", "1"),
        "every 10, V-trace": ("--exchange-every", "10"),
        "every 10, uncorrected": ("--exchange-every", "10", "--correction", "none"),
        "never, V-trace": ("--exchange-every", "0", "--renew-every", "10"),
    }
)
"""Options of launch/train_agents.py by setting."""
KINDS = MappingProxyType(
    {
        "bytes_sent": "KB of gradients per update",
        "bytes_uncompressed": "uncompressed",
        "bytes_islands": "KB between agents",
    }
)
GOAL = 400.0
"""Mean return of the agents that counts as solved; the maximum is 500."""
LAST = 3
"""Number of final evaluations in the reported mean."""


@dataclass(frozen=True)
class Run:
    """Results of one seed: mean returns of the agents by update, and bytes per rank and update by kind."""

    updates: tuple[int, ...]
    returns: tuple[float, ...]
    traffic: Mapping[str, float]

    @property
    def final(self) -> float:
        """Mean return of the last evaluations."""
        return statistics.fmean(self.returns[-LAST:])

    @property
    def settled(self) -> int | None:
        """Update from which all evaluations reach the goal, or None if the last one does not."""
        below = [index for index, value in enumerate(self.returns) if value < GOAL]
        return next(iter(self.updates[max(below, default=-1) + 1 :]), None)


def main() -> None:
    """Run what is missing, print the table and draw the picture."""
    options = parse_options()
    check_plotting("--picture")
    found = {name: list(runs(name, options)) for name in SETTINGS}
    print("\n".join(rows(found)))
    draw(found, options.picture)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare how often agents exchange their trunk.")
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the runs of each setting")
    add("--picture", type=Path, required=True, metavar="FILE", help="PNG of returns by update")
    add("--updates", type=int, default=120, metavar="N", help="updates of each agent; default: 120")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--ranks", type=int, default=4, metavar="N", help="processes; default: 4")
    return parser.parse_args()


def runs(name: str, options: argparse.Namespace) -> Iterator[Run]:
    """Return the runs of all seeds, after training the missing ones."""
    directory = options.output_dir / name.replace(", ", "_").replace(" ", "_")
    files = {seed: directory / f"seed_{seed}.json" for seed in options.seeds}
    missing = [str(seed) for seed, file in files.items() if not file.exists()]
    if missing:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        program = [str(options.ranks), "-m", "launch.train_agents", "--output-dir", str(directory)]
        length = ["--updates", str(options.updates), "--seeds", *missing]
        subprocess.run([*launcher, *program, *length, *SETTINGS[name]], check=True)
    return (read(file) for file in files.values())


def read(file: Path) -> Run:
    """Read a file of launch/train_agents.py."""
    found = json.loads(file.read_text(encoding="utf-8"))
    curve = found["curve"]
    means = tuple(statistics.fmean(point["returns"]) for point in curve)
    return Run(tuple(point["update"] for point in curve), means, found["bytes"])


def rows(found: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return the lines of a Markdown table."""
    names = ("exchange", "return at the end (seeds)", f"above {GOAL:g} from update", *KINDS.values())
    return [line(names), line(["---"] * len(names)), *(line(cells(name, some)) for name, some in found.items())]


def line(found: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(found)} |"


def cells(name: str, some: Sequence[Run]) -> list[str]:
    """Return the cells of a setting."""
    final = ", ".join(f"{one.final:.0f}" for one in some)
    settled = ", ".join("-" if one.settled is None else str(one.settled) for one in some)
    sent = [statistics.fmean(one.traffic[kind] for one in some) / 1e3 for kind in KINDS]
    mean = statistics.fmean(one.final for one in some)
    return [name, f"{mean:.0f} ({final})", settled, *(f"{kb:.1f}" for kb in sent)]


def draw(found: Mapping[str, Sequence[Run]], file: Path) -> None:
    """Plot the mean and the range of the seeds over updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for (name, some), colour in zip(found.items(), COLOURS, strict=False):
        seeds = list(zip(*(one.returns for one in some), strict=True))
        updates = some[0].updates
        axes.plot(updates, [statistics.fmean(values) for values in seeds], color=colour, label=name)
        axes.fill_between(updates, list(map(min, seeds)), list(map(max, seeds)), color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("updates of each agent", fontsize=9)
    axes.set_ylabel("return of an episode, mean of both agents", fontsize=9)
    axes.set_ylim(0, 510)
    style_axes(axes, "Two agents with one trunk, by how often they exchange it: mean and range of seeds")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
