"""Data of the panels in a report, before they are drawn: charts over steps, and bars of medians."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from deepspeed_compress.tools.report.figures import TRAFFIC, median
from deepspeed_compress.tools.report.runs import Marker, Run, markers, settings_timelines

POINTS = 360
"""Maximum number of points of a line, roughly. More would not be visible."""


@dataclass(frozen=True)
class Line:
    """Line of a chart. `colour` is a name of the palette. `steps` ascend."""

    name: str
    colour: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    faint: bool = False
    dashed: bool = False

    @property
    def wide(self) -> bool:
        """Return True if the line is drawn wider, so that a baseline stays visible under a run with equal values."""
        return self.colour == "baseline" and not self.faint and not self.dashed


@dataclass(frozen=True)
class Chart:
    """Values over optimizer steps.

    Attributes:
        title: Title above the chart.
        first: First step of the axis. All charts of a report share the same axis.
        last: Last step of the axis.
        lines: Lines to draw, at least one.
        from_zero: Whether the vertical axis includes zero.
        decades: Whether the vertical axis is logarithmic.
        markers: Events to mark on the step axis.
    """

    title: str
    first: int
    last: int
    lines: tuple[Line, ...]
    from_zero: bool
    decades: bool = False
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True)
class Bars:
    """Stacked bars, one per run. Each entry of `parts` is a title, a color and one value per run."""

    title: str
    unit: str
    runs: tuple[str, ...]
    parts: tuple[tuple[str, str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Curve:
    """Column of a run that is drawn as a line.

    Attributes:
        key: Name of the column.
        name: Label of the line. Defaults to the name of the run.
        colour: Color of the line. Defaults to the color of the run.
        run_only: Whether the line is left out for the baseline.
        faint: Whether the line is drawn faintly.
        dashed: Whether the line is dashed.
    """

    key: str
    name: str = ""
    colour: str = ""
    run_only: bool = False
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """Specification of a chart. Values are divided by `unit`. An `optional` chart is not reported as missing."""

    title: str
    curves: tuple[Curve, ...]
    source: str
    unit: float = 1.0
    from_zero: bool = True
    wide_range: bool = False
    with_marks: bool = False
    optional: bool = False


_STATISTICS = "compression.jsonl, written to monitor.path"
_LATER = "compression.jsonl of this version"
_COMPARED = "compression.jsonl, with monitor.cosine_every"
_GUARDED = "compression.jsonl with the guard on, or Trainer's log"

CHARTS = (
    ChartSpec(
        "Loss: held-out, and training (faint)",
        (Curve("train_loss", faint=True), Curve("eval_loss")),
        "metrics.jsonl, or Trainer's log",
        from_zero=False,
        with_marks=True,
    ),
    ChartSpec("Step time, ms", (Curve("step_ms"),), "metrics.jsonl, or " + _LATER),
    ChartSpec(
        "Gradients sent per rank and step, MB",
        (Curve("bytes_uncompressed", "DeepSpeed alone", "baseline", run_only=True, dashed=True), Curve("bytes_sent")),
        _STATISTICS,
        unit=1e6,
    ),
    ChartSpec("Compression ratio of gradients", (Curve("ratio"),), _STATISTICS),
    ChartSpec(
        "Sent to other islands per rank and step, MB", (Curve("bytes_islands"),), _STATISTICS, unit=1e6, optional=True
    ),
    ChartSpec(
        "Changes for rollout workers per version, MB", (Curve("rollout_bytes"),), _STATISTICS, unit=1e6, optional=True
    ),
    ChartSpec("Age of the weights of rollout workers, s", (Curve("rollout_age_ms"),), _STATISTICS, 1e3, optional=True),
    ChartSpec("Cosine similarity to the true mean gradient", (Curve("cosine"),), _COMPARED, from_zero=False),
    ChartSpec("Norm of the residuals", (Curve("residual_norm"),), _STATISTICS, wide_range=True),
    ChartSpec("Norm of the gradient", (Curve("grad_norm"),), _GUARDED, wide_range=True),
    ChartSpec(
        "Busy time of ranks, ms",
        (
            Curve("busy_ms_max", "slowest rank", "orange", run_only=True),
            Curve("busy_ms_median", "median rank", "run", run_only=True),
        ),
        _LATER,
    ),
    ChartSpec("Peak memory of a rank, GiB", (Curve("memory_bytes"),), _LATER, unit=2**30),
)

_TIMES = (
    ("compress", "purple", "compress_ms"),
    ("wait for communication", "orange", "communicate_ms"),
    ("decompress", "green", "decompress_ms"),
)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts that have data."""
    first, last = min(run.span[0] for run in runs), max(run.last_step for run in runs)
    return [
        Chart(
            title=spec.title,
            first=first,
            last=last,
            lines=lines,
            from_zero=spec.from_zero,
            decades=_spans_decades(spec, lines),
            markers=markers(runs[-1]) if spec.with_marks else (),
        )
        for spec in CHARTS
        if (lines := tuple(_lines(spec, runs)))
    ]


def missing(runs: Sequence[Run]) -> dict[str, str]:
    """Return the titles of the parts of the report that have no data, each with the source that would provide them."""
    specs = {
        spec.title: spec.source
        for spec in CHARTS
        if not spec.optional and not any(run.column(curve.key) for run in runs for curve in spec.curves)
    }
    others = {"Median time of a step, ms": _LATER, "Sent by one rank in a step, MB": _STATISTICS}
    shown = {bar.title for bar in bars(runs)}
    others = {title: source for title, source in others.items() if title not in shown}
    return specs | others | ({} if settings_timelines(runs) else {"Settings in force": _STATISTICS})


def _lines(spec: ChartSpec, runs: Sequence[Run]) -> list[Line]:
    curves = [(curve, run) for run in runs for curve in spec.curves if run.role == "run" or not curve.run_only]
    lines = [line for curve, run in curves if (line := _line(curve, run, spec.unit)) is not None]
    # Without a held-out loss, the training loss is the only line, so there is no reason to draw it faintly.
    return lines if any(not line.faint for line in lines) else [replace(line, faint=False) for line in lines]


def _line(curve: Curve, run: Run, unit: float) -> Line | None:
    """Return the line of a curve, or None without values.

    Traffic that is always zero is left out. Zeros in other columns are meaningful and stay.
    """
    column = run.column(curve.key)
    if not (any(column.values()) if curve.key.startswith("bytes_") else column):
        return None
    steps, values = zip(*_thinned([(step, value / unit) for step, value in column.items()]), strict=True)
    return Line(curve.name or run.name, curve.colour or run.role, steps, values, curve.faint, curve.dashed)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most about `POINTS` points.

    Keeps the smallest and the largest point of each group of neighbors, so that spikes remain visible.
    """
    size = -(-2 * len(points) // POINTS)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)] if size > 2 else []
    value = itemgetter(1)
    ends = [{min(group, key=value), max(group, key=value)} for group in groups]
    return sorted(point for pair in ends for point in pair) if groups else points


def _spans_decades(spec: ChartSpec, lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.values]
    return spec.wide_range and min(values) > 0 and max(values) > 100 * statistics.median(values)


def bars(runs: Sequence[Run]) -> list[Bars]:
    """Return the bars of step time and of traffic per step, for the runs that recorded them."""
    return [one for one in (_time_bars(runs), _traffic_bars(runs)) if one is not None]


def _time_bars(runs: Sequence[Run]) -> Bars | None:
    measured = [run for run in runs if run.column("step_ms")]
    if not any(run.column("compress_ms") for run in measured):
        return None
    means = {title: [median(run, key) or 0.0 for run in measured] for title, _, key in _TIMES}
    wholes = [median(run, "step_ms") or 0.0 for run in measured]
    rest = tuple(max(0.0, whole - sum(parts)) for whole, *parts in zip(wholes, *means.values(), strict=True))
    parts = [(title, colour, tuple(means[title])) for title, colour, _ in _TIMES]
    names = tuple(run.name for run in measured)
    rests = ("all else, with DeepSpeed's own messages", "run-soft", rest)
    return Bars("Median time of a step, ms", "ms", names, (rests, *parts))


def _traffic_bars(runs: Sequence[Run]) -> Bars | None:
    """Return the bars of traffic. Runs whose statistics do not distinguish uncompressed gradients are left out."""
    measured = [run for run in runs if run.column("bytes_raw")]
    found = [(kind, tuple((kind.size(run) or 0.0) / 1e6 for run in measured)) for kind in TRAFFIC]
    parts = tuple((kind.title, kind.colour, sizes) for kind, sizes in found if any(sizes))
    return Bars("Sent by one rank in a step, MB", "MB", tuple(run.name for run in measured), parts) if parts else None
