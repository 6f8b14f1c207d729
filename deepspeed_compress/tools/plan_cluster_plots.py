"""Pictures of ``ds-compress plan cluster``: steps of layouts, and other sizes and networks of the cluster."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from deepspeed_compress.planner.search import Candidate, Job, Plan
from deepspeed_compress.planner.sweep import KINDS, Sweep, over_gpus, over_network
from deepspeed_compress.tools import plots

BEST = 10
"""Layouts whose steps are shown."""
LARGEST = 10_240
"""GPUs up to which nodes are doubled."""
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 400, 800, 1600)
"""Gbit/s of a node."""
GAIN = 0.05
"""Relative gain from which compression is said to pay, which is the difference that a prediction can see."""
_SIZE = (9.0, 4.6)
_COLOURS = MappingProxyType(dict(zip(KINDS, (plots.GREY, *plots.COLOURS), strict=False)))
_PARTS: Mapping[str, str] = {
    "compute": plots.COLOURS[0],
    "memory": "#76a5af",
    "launch": "#cfe2f3",
    "bubble": "#ffe599",
    **dict.fromkeys(("NVLink", "xGMI", "PCIe", "loopback"), "#38761d"),
    "network": "#e69138",
}
"""Colors by kind of term."""


def draw_all(plan: Plan, job: Job, directory: Path) -> Iterator[Path]:
    """Write the pictures of a plan into `directory`, and yield their paths. A single node has no network to draw."""
    directory.mkdir(parents=True, exist_ok=True)
    yield draw_steps(plan.candidates[:BEST], job, directory / "steps.png")
    sizes = over_gpus(job, sizes_of(job.cluster.per_node))
    yield draw_scaling(sizes, job, directory / "scaling.png")
    if job.cluster.nodes > 1:
        rates = over_network(job, [rate * 1e9 / 8 for rate in RATES])
        yield draw_network(rates, job, directory / "network.png")


def sizes_of(per_node: int) -> list[int]:
    """Return numbers of GPUs: nodes are doubled up to `LARGEST` GPUs."""
    return [per_node * 2**power for power in range(32) if per_node * 2**power <= LARGEST]


def draw_steps(candidates: Sequence[Candidate], job: Job, file: Path) -> Path:
    """Draw a bar for the step of each candidate, divided by what takes the time. Hidden messages have no part."""
    figure = plots.new_figure(*_SIZE)
    axes = figure.add_subplot()
    names = [str(one.layout) for one in candidates]
    left = [0.0] * len(names)
    for kind, colour in _PARTS.items():
        seconds = [one.prediction.share(kind) * one.prediction.seconds for one in candidates]
        if any(seconds):
            axes.barh(names, seconds, 0.7, left, color=colour, label=kind)
            left = [start + width for start, width in zip(left, seconds, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.3g}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, 1.08 * max(left))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    plots.style_axes(axes, f"Best layouts of {_title(job)}, fewest days first")
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, fontsize=8, ncols=len(_PARTS), loc="lower right", bbox_to_anchor=(1, 1.04))
    return plots.save_figure(figure, file)


def draw_scaling(sweep: Sweep, job: Job, file: Path) -> Path:
    """Draw tokens per second and GPU over the number of GPUs. Additional tokens do not count."""
    figure = plots.new_figure(*_SIZE)
    axes = figure.add_subplot()
    for name, found in _found(sweep):
        rates = [one.prediction.rate / (1 + one.extra) / gpus for gpus, one in found.items()]
        axes.plot(list(found), rates, "o-", color=_COLOURS[name], markersize=4, label=name)
    sizes = sorted({int(gpus) for found in sweep.values() for gpus in found})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"{job.cluster.gpu.name} GPUs")
    axes.set_ylabel("tokens/s per GPU")
    network = f"{job.cluster.network * 8e-9:g} Gbit/s per node"
    plots.style_axes(axes, f"{job.model.name}, best layout at each size, {network}, always {_batch(job)}")
    return plots.save_figure(figure, file)


def draw_network(sweep: Sweep, job: Job, file: Path) -> Path:
    """Draw the seconds of the best step over the rate of a node, with the rate below which each setting pays."""
    figure = plots.new_figure(*_SIZE)
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


def _title(job: Job) -> str:
    return f"{job.model.name} on {job.cluster}"


def _batch(job: Job) -> str:
    return f"{job.batch:,} sequences of {job.seq:,} tokens per step"
