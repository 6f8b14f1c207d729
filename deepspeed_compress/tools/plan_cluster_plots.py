"""Picture of ``ds-compress plan cluster``: the best step for each compression, over the rate of the network."""

from collections.abc import Mapping
from pathlib import Path

from deepspeed_compress.planner.search import Candidate, Job
from deepspeed_compress.planner.sweep import Sweep, over_network
from deepspeed_compress.tools import plots

RATES = (1, 2, 5, 10, 20, 50, 100, 200, 400, 800, 1600)
"""Gbit/s of a node."""
GAIN = 0.05
"""Relative gain from which compression is said to pay, which is the difference that a prediction can see."""


def draw(job: Job, file: Path) -> Path:
    """Draw the seconds of the best step over the rate of a node, with the rate below which each setting pays."""
    sweep = over_network(job, [rate * 1e9 / 8 for rate in RATES])
    figure = plots.new_figure(9.0, 4.6)
    axes = figure.add_subplot()
    for (name, found), colour in zip(_found(sweep), (plots.GREY, *plots.COLOURS), strict=False):
        rates, seconds = [rate * 8e-9 for rate in found], [one.prediction.seconds for one in found.values()]
        label = name + _worth(sweep, name)
        axes.plot(rates, seconds, "o-", color=colour, markersize=4, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="minor", labelsize=8)
    plots.plain_decades(axes, (0.9 * RATES[0], 1.1 * RATES[-1]))
    axes.set_xlabel("Gbit/s per node")
    axes.set_ylabel("seconds of the best step")
    plots.style_axes(axes, f"{job.model.name} on {job.cluster.gpus:,} {job.cluster.gpu.name}, {_batch(job)}")
    return plots.save_figure(figure, file)


def _found(sweep: Sweep) -> list[tuple[str, Mapping[float, Candidate]]]:
    """Return the settings for which any layout fits; a single node has no islands, for example."""
    return [(name, found) for name, found in sweep.items() if found]


def paying_rate(sweep: Sweep, name: str) -> float | None:
    """Return the highest rate at which a setting takes `GAIN` less time than no compression, or None."""
    plain = sweep["uncompressed"]
    pays = (
        rate
        for rate, one in sweep[name].items()
        if rate in plain and one.prediction.seconds <= (1 - GAIN) * plain[rate].prediction.seconds
    )
    return max(pays, default=None)


def _worth(sweep: Sweep, name: str) -> str:
    rate = paying_rate(sweep, name)
    if name == "uncompressed":
        return ""
    return ": never pays" if rate is None else f": pays up to {rate * 8e-9:g} Gbit/s"


def _batch(job: Job) -> str:
    return f"{job.batch:,} sequences of {job.seq:,} tokens per step"
