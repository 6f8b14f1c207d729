#!/usr/bin/env python3
"""Predict what compression is worth for models of 7B to 175B parameters on 128 to 10,240 GPUs.

Each figure divides the days of the best uncompressed layout by those of the best compressed one, at the same batch and
for the same loss. Both are layouts of DeepSpeed.

examples, from the root of the repository:
  python -m launch.studies.planner_scaling
  python -m launch.studies.planner_scaling --models 7B --sizes 128 --gpus A100 --rates 10 100
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.gpus import find_gpu
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.search import Candidate, Job
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.planner.sweep import KINDS, over_network
from deepspeed_compress.tools.plots import new_figure, save_figure
from launch.studies.harness import new_parser

MODELS: Mapping[str, Model] = {
    "7B": Model("Llama 2 7B", "llama", 32, 4096, 32, 32, 128, 11008, True, 32000, False),
    "13B": Model("Llama 2 13B", "llama", 40, 5120, 40, 40, 128, 13824, True, 32000, False),
    "70B": Model("Llama 2 70B", "llama", 80, 8192, 64, 8, 128, 28672, True, 32000, False),
    "175B": Model("GPT-3", "gpt2", 96, 12288, 96, 96, 128, 49152, False, 50257, True, positions=2048),
}
TOKENS: Mapping[int, int] = {128: 2**22, 512: 2**22, 2048: 2**23, 10240: 5 * 2**22}
"""Tokens of a step by number of GPUs: 4M, 4M, 8M and 20M."""
RATES = (10, 25, 50, 100, 200, 400)
"""Gbit/s of a node."""
SEQUENCES: Mapping[str, int] = {"175B": 2048}
"""Tokens of a sequence, 4,096 if a model is not listed."""
PER_PARAMETER = 20
"""Tokens of a run for each parameter."""


@dataclass(frozen=True)
class Row:
    """Gains of one model on one number of GPUs.

    Attributes:
        gpu: Type of the GPUs.
        model: Key of `MODELS`.
        size: Number of GPUs.
        gains: Gain of compression, and gain of islands, by rate of a node in Gbit/s; None if nothing fits.
        best: Name of the best compressed layout by rate.
    """

    gpu: str
    model: str
    size: int
    gains: Mapping[float, tuple[float | None, float | None]]
    best: Mapping[float, str]

    @property
    def name(self) -> str:
        """Text for tables."""
        return f"{self.model}, {self.size:,}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of gains, and draw it if --output is given."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=TOKENS, default=list(TOKENS), help="numbers of GPUs")
    parser.add_argument("--gpus", nargs="+", default=["A100", "H100"], metavar="TYPE", help="types of GPUs")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), metavar="GBIT", help="of a node")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the gains of compression")
    options = parser.parse_args(arguments)
    rows = []
    for gpu in options.gpus:
        print(f"\n{gpu}: gain of compression / of islands, by Gbit/s per node\n{_head(options.rates)}")
        for model in options.models:
            for size in options.sizes:
                rows.append(measure(gpu, model, size, options.rates))
                print(line(rows[-1]), flush=True)
    if options.output is not None:
        draw(rows, options.output)
    return 0


def job(gpu: str, model: str, size: int, gbit: float = 100.0) -> Job:
    """Return the job of a row."""
    found, shape, seq = find_gpu(gpu), MODELS[model], SEQUENCES.get(model, 4096)
    cluster = Cluster(found, size, found.per_node, gbit * 1e9 / 8)
    tokens = float(PER_PARAMETER * shape.parameters)
    return Job(cluster, shape, SOFTWARE["deepspeed"], seq, TOKENS[size] // seq, tokens)


def measure(gpu: str, model: str, size: int, rates: Sequence[float]) -> Row:
    """Return the predicted gains of a model on a number of GPUs."""
    sweep = over_network(job(gpu, model, size), [rate * 1e9 / 8 for rate in rates], KINDS)
    gains, names = {}, {}
    for rate in rates:
        plain, packed, islands = (sweep[kind].get(rate * 1e9 / 8) for kind in KINDS)
        gains[rate] = (gain(plain, packed), gain(plain, islands))
        names[rate] = str(packed.layout) if packed else ""
    return Row(gpu, model, size, gains, names)


def gain(plain: Candidate | None, other: Candidate | None) -> float | None:
    """Return how many times as fast a run to the same loss is, or None if one of the two fits nowhere."""
    return plain.days / other.days if plain and other else None


def _head(rates: Sequence[float]) -> str:
    return f"{'model, GPUs':14}" + "".join(f"{rate:>13g}" for rate in rates) + "  best compressed layout, slowest"


def line(row: Row) -> str:
    """Return the line of a row: both gains at each rate, and a layout."""
    cells = ("/".join(_cells(gains)) for gains in row.gains.values())
    return f"{row.name:14}" + "".join(f"{cell:>13}" for cell in cells) + f"  {next(iter(row.best.values()))}"


def _cells(gains: Sequence[float | None]) -> Iterator[str]:
    for one in gains:
        yield "-" if one is None else f"{one:.2f}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the gains of compression as a table with colors, with one panel for each type of GPU."""
    types = list(dict.fromkeys(row.gpu for row in rows))
    tallest = max(sum(row.gpu == gpu for row in rows) for gpu in types)
    figure = new_figure(4.6 * len(types), 1.1 + 0.3 * tallest)
    for axes, gpu in zip(figure.subplots(1, len(types), squeeze=False)[0], types, strict=True):
        _draw_panel(axes, gpu, [row for row in rows if row.gpu == gpu])
    save_figure(figure, file)


def _draw_panel(axes: Any, gpu: str, rows: Sequence[Row]) -> None:
    gains = [[compressed or float("nan") for compressed, _ in row.gains.values()] for row in rows]
    axes.imshow(gains, cmap="Blues", vmin=0.8, vmax=4, aspect="auto")
    for place, values in enumerate(gains):
        for column, value in enumerate(values):
            text, color = ("-", "black") if value != value else (f"{value:.2f}", "white" if value > 2.6 else "black")
            axes.text(column, place, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(gains[0])), [f"{rate:g}" for rate in rows[0].gains], fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_xlabel("Gbit/s per node", fontsize=9)
    axes.set_title(f"{gpu}: times as fast with compression", fontsize=10, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
