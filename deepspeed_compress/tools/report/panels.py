"""What a report shows of runs, before anybody draws it: charts over steps, and bars of means."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.tools.report.figures import TRAFFIC
from deepspeed_compress.tools.report.runs import Run
from deepspeed_compress.tools.report.timeline import Marker, markers, settings_timelines

__all__ = ["Bars", "Chart", "Line", "Missing", "bars", "charts", "missing"]

POINTS = 360
"""Of a line; more are not seen."""


@dataclass(frozen=True)
class Line:
    """`colour`: a name of the palette. Steps ascend."""

    name: str
    colour: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    faint: bool = False
    dashed: bool = False

    @property
    def wide(self) -> bool:
        """A baseline shows below the run where they are equal."""
        return self.colour == "baseline" and not self.faint and not self.dashed


@dataclass(frozen=True)
class Chart:
    """Values against optimizer steps, `first` to `last` in all charts of a report. `decades`: on a logarithmic axis."""

    title: str
    first: int
    last: int
    lines: tuple[Line, ...]
    from_zero: bool
    decades: bool = False
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True)
class Bars:
    """A bar a run, of parts: title, colour, and one value a run."""

    title: str
    unit: str
    runs: tuple[str, ...]
    parts: tuple[tuple[str, str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Missing:
    """A part of the report for which there are no data, and where they would come from."""

    title: str
    source: str


@dataclass(frozen=True)
class Curve:
    """A column on a chart. `name`: in place of the run's; `run_only`: not of the baseline."""

    key: str
    name: str = ""
    colour: str = ""
    run_only: bool = False
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """Specification of a chart. Values are divided by `unit`. An `optional` chart is not missed in runs without it."""

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
    """Those for which there are data."""
    first, last = min(run.first_step for run in runs), max(run.last_step for run in runs)
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


def missing(runs: Sequence[Run]) -> list[Missing]:
    """What the report has no data for."""
    specs = [
        Missing(spec.title, spec.source)
        for spec in CHARTS
        if not spec.optional and not any(run.column(curve.key) for run in runs for curve in spec.curves)
    ]
    named = {"Median time of a step, ms": _LATER, "Sent by one rank in a step, MB": _STATISTICS}
    shown = {one.title for one in bars(runs)}
    rest = [Missing(title, source) for title, source in named.items() if title not in shown]
    return specs + rest + ([] if settings_timelines(runs) else [Missing("Settings in force", _STATISTICS)])


def _lines(spec: ChartSpec, runs: Sequence[Run]) -> list[Line]:
    curves = [(curve, run) for run in runs for curve in spec.curves if run.role == "run" or not curve.run_only]
    lines = [_line(curve, run, spec.unit) for curve, run in curves if _has_figures(curve, run)]
    # Without held-out loss the training loss is all there is, and needs no fainter line beside it.
    return lines if any(not line.faint for line in lines) else [_strong(line) for line in lines]


def _has_figures(curve: Curve, run: Run) -> bool:
    """Return False for traffic that the run does not have; the zeros of all other figures mean something."""
    values = run.column(curve.key).values()
    return any(values) if curve.key.startswith("bytes_") else bool(values)


def _strong(line: Line) -> Line:
    return Line(line.name, line.colour, line.steps, line.values)


def _line(curve: Curve, run: Run, unit: float) -> Line:
    points = _thinned([(step, value / unit) for step, value in run.column(curve.key).items()])
    return Line(
        name=curve.name or run.name,
        colour=curve.colour or run.role,
        steps=tuple(step for step, _ in points),
        values=tuple(value for _, value in points),
        faint=curve.faint,
        dashed=curve.dashed,
    )


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about `POINTS`: the smallest and the largest of every group of neighbours, so that spikes stay."""
    size = -(-2 * len(points) // POINTS)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)] if size > 2 else []
    ends = [{min(group, key=_value), max(group, key=_value)} for group in groups]
    return sorted(point for pair in ends for point in pair) if groups else points


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _spans_decades(spec: ChartSpec, lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.values]
    return spec.wide_range and min(values) > 0 and max(values) > 100 * statistics.median(values)


def bars(runs: Sequence[Run]) -> list[Bars]:
    """Where the time of a step goes, and what is sent in it; of the runs whose files tell."""
    return [one for one in (_time_bars(runs), _traffic_bars(runs)) if one is not None]


def _time_bars(runs: Sequence[Run]) -> Bars | None:
    told = [run for run in runs if run.column("step_ms")]
    if not any(run.column("compress_ms") for run in told):
        return None
    means = {title: [_median(run, key) for run in told] for title, _, key in _TIMES}
    wholes = [_median(run, "step_ms") for run in told]
    rest = tuple(max(0.0, whole - sum(parts)) for whole, *parts in zip(wholes, *means.values(), strict=True))
    parts = [(title, colour, tuple(means[title])) for title, colour, _ in _TIMES]
    return Bars(
        "Median time of a step, ms",
        "ms",
        _names(told),
        (("all else, with DeepSpeed's own messages", "run-soft", rest), *parts),
    )


def _median(run: Run, key: str) -> float:
    values = run.column(key).values()
    return statistics.median(values) if values else 0.0


def _traffic_bars(runs: Sequence[Run]) -> Bars | None:
    """Without runs whose statistics do not tell what is compressed."""
    told = [run for run in runs if run.column("bytes_raw")]
    found = [(kind, tuple((kind.size(run) or 0.0) / 1e6 for run in told)) for kind in TRAFFIC]
    parts = tuple((kind.title, kind.colour, sizes) for kind, sizes in found if any(sizes))
    return Bars("Sent by one rank in a step, MB", "MB", _names(told), parts) if parts else None


def _names(runs: Sequence[Run]) -> tuple[str, ...]:
    return tuple(run.name for run in runs)
