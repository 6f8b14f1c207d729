"""Final figures of runs: a table with the change relative to the baseline."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.numbers import UNKNOWN, change, gibibytes, megabytes, milliseconds
from deepspeed_compress.tools.report.runs import Run


@dataclass(frozen=True)
class TrafficKind:
    """Kind of traffic: the bytes in column `key`, minus those in column `part`, if any."""

    title: str
    colour: str
    key: str
    part: str = ""

    def size(self, run: Run) -> float | None:
        """Return the mean bytes per step, or None if they were not counted."""
        whole, part = _mean(run, self.key), _mean(run, self.part) if self.part else 0.0
        return None if whole is None or part is None else whole - part


TRAFFIC = (
    TrafficKind("gradients, compressed", "run", "bytes_sent", "bytes_raw"),
    TrafficKind("gradients, uncompressed", "run-soft", "bytes_raw"),
    TrafficKind("weights", "green", "bytes_weights"),
    TrafficKind("activations between stages", "yellow", "bytes_pipeline"),
    TrafficKind("gradients of tied weights", "orange", "bytes_tied"),
    TrafficKind("tensor parallelism", "purple", "bytes_tensor"),
    TrafficKind("tokens between experts", "cyan", "bytes_experts"),
    TrafficKind("sequence parallelism", "brown", "bytes_sequence"),
    TrafficKind("exchanges between islands", "red", "bytes_islands"),
)


@dataclass(frozen=True)
class Metric:
    """Row of the table of figures.

    Attributes:
        title: Label of the row.
        of: Function that computes the figure of a run, or None if it is unknown.
        form: Function that formats the figure.
        compared: Whether the change relative to the baseline is meaningful.
        optional: Whether the row is left out if all figures are zero.
        tile: Whether the figure is also shown as a tile at the top of the page.
        column: Column of a figure that depends on how far training is. With a baseline, both figures are those at the
            last step that both runs have in it.
        of_whole: Whether only runs of equal length can be compared.
    """

    title: str
    of: Callable[[Run], float | None]
    form: Callable[[Any], str]
    compared: bool = True
    optional: bool = False
    tile: bool = False
    column: str = ""
    of_whole: bool = False

    def row(self, runs: list[Run]) -> tuple[str, list[float | None], bool]:
        """Return the title, the figures of `runs`, and whether their change is meaningful."""
        # Last step at which all runs have a value of `column`.
        steps = [run.column(self.column).keys() for run in runs] if self.column else [()]
        last = max(set.intersection(*map(set, steps)), default=None)
        figures = [self.of(run if last is None else run.until(last)) for run in runs]
        lengths = {max(run.column(self.column), default=0) if self.column else run.last_step for run in runs}
        if last is None or len(lengths) == 1:
            return self.title, figures, self.compared and (len(lengths) == 1 or not (self.column or self.of_whole))
        return f"{self.title}, up to step {last:,}", figures, self.compared


def _mean(run: Run, key: str) -> float | None:
    values = run.column(key).values()
    return statistics.fmean(values) if values else None


def _last(run: Run, key: str) -> float | None:
    return next(reversed(run.column(key).values()), None)


def _recent_loss(run: Run) -> float | None:
    """Return the mean loss of the last tenth of the steps, because a single step is too noisy."""
    values = list(run.column("train_loss").values())
    return statistics.fmean(values[-max(1, len(values) // 10) :]) if values else None


def median(run: Run, key: str) -> float | None:
    """Return the median of a column; None without values."""
    values = run.column(key).values()
    return statistics.median(values) if values else None


def _ratio(run: Run) -> float | None:
    sent, alone = _mean(run, "bytes_sent"), _mean(run, "bytes_uncompressed")
    # Trainer's log holds the ratio itself but not the bytes that it is computed from.
    return alone / sent if sent and alone is not None else _mean(run, "ratio")


def _total_ratio(run: Run) -> float | None:
    """Return the ratio over the bytes of all steps, weighted by the bytes sent.

    Trainer's log holds only the ratio, so its mean is used there.
    """
    ratios, columns = run.column("total_ratio"), [run.column(kind.key) for kind in TRAFFIC if kind.key != "bytes_raw"]
    sent = {step: sum(column.get(step, 0) for column in columns) for step in ratios}
    whole = sum(sent.values())
    return sum(ratio * sent[step] for step, ratio in ratios.items()) / whole if whole else _mean(run, "total_ratio")


def _of_summary(key: str) -> Callable[[Run], float | None]:
    return lambda run: (run.files.summary or {}).get(key)


def _nonzero(run: Run, key: str) -> dict[int, Any]:
    """Return the values of a column that are not zero, by step."""
    return {step: value for step, value in run.column(key).items() if value}


def _mean_of_nonzero(run: Run, key: str) -> float | None:
    values = _nonzero(run, key).values()
    return statistics.fmean(values) if values else None


def _count_exchanges(run: Run) -> float | None:
    """Return the number of measured steps that follow an exchange, or None if there are none.

    Their bytes tell. An event is only written if other islands took part than in the exchange before, or if it failed.
    """
    return len(_nonzero(run, "bytes_islands")) or None


def _count_versions(run: Run) -> float | None:
    return len(run.column("rollout_version")) or None


def _extra_milliseconds(run: Run) -> float | None:
    """Return how many milliseconds longer a step after an exchange takes, as a difference of medians."""
    after = _nonzero(run, "bytes_islands")
    with_exchange: list[float] = []
    without: list[float] = []
    for step, taken in run.column("step_ms").items():
        (with_exchange if step in after else without).append(taken)
    return statistics.median(with_exchange) - statistics.median(without) if with_exchange and without else None


def _discarded(run: Run) -> float | None:
    """Return the number of exchanges that were discarded, or None for islands that do not record it."""
    events = _island_events(run)
    return float(sum(event["kind"] == "islands_void" for event in events)) if events else None


def _lost_seconds(run: Run) -> float | None:
    """Return the seconds that failed exchanges have taken, or None for islands that do not record it."""
    events = _island_events(run)
    failed = [event.get("evidence") or {} for event in events if event["kind"] != "islands_exchange"]
    return sum(evidence.get("seconds") or 0.0 for evidence in failed) if events else None


def _island_events(run: Run) -> list[Mapping[str, Any]]:
    return [event for event in run.events if str(event["kind"]).startswith("islands_")]


METRICS = (
    Metric("held-out loss", lambda run: _last(run, "eval_loss"), "{:.4f}".format, tile=True, column="eval_loss"),
    Metric("training loss, last tenth", _recent_loss, "{:.4f}".format, column="train_loss"),
    Metric(
        "training loss, mean of the whole run",
        lambda run: _last(run, "mean_train_loss"),
        "{:.4f}".format,
        of_whole=True,
    ),
    Metric("median step time", lambda run: median(run, "step_ms"), milliseconds, tile=True),
    Metric(
        "training time, including evaluation and saving",
        lambda run: _last(run, "train_runtime"),
        "{:,.1f} s".format,
        of_whole=True,
    ),
    Metric("tokens per second", _of_summary("tokens_per_s"), "{:,.0f}".format),
    Metric(
        "gradients sent per rank and step", lambda run: _mean(run, "bytes_sent"), megabytes, optional=True, tile=True
    ),
    Metric("compression ratio of all traffic", _total_ratio, "{:.2f}".format, compared=False, tile=True),
    Metric("compression ratio of gradients", _ratio, "{:.2f}".format, compared=False, tile=True),
    *(Metric(f"sent: {kind.title}", kind.size, megabytes, optional=True) for kind in TRAFFIC[1:]),
    Metric("sent: exact weights, for checkpoints", lambda run: _mean(run, "bytes_exact"), megabytes, optional=True),
    Metric("exchanges between islands", _count_exchanges, "{:,.0f}".format, compared=False, tile=True),
    Metric("sent per rank and exchange", lambda run: _mean_of_nonzero(run, "bytes_islands"), megabytes, tile=True),
    Metric("extra time of a step with an exchange", _extra_milliseconds, milliseconds, tile=True),
    Metric("time lost in exchanges that failed", _lost_seconds, "{:,.1f} s".format, optional=True),
    Metric("exchanges discarded", _discarded, "{:,.0f}".format, compared=False, optional=True),
    Metric("versions for rollout workers", _count_versions, "{:,.0f}".format, compared=False, tile=True),
    Metric("bytes of a version", lambda run: _mean(run, "rollout_bytes"), megabytes, tile=True),
    Metric("bytes of a full copy", lambda run: _mean_of_nonzero(run, "rollout_full_bytes"), megabytes),
    Metric("values that change in a version", lambda run: _mean(run, "rollout_changed"), "{:.2%}".format),
    Metric("time to encode a version", lambda run: _mean(run, "rollout_encode_ms"), milliseconds),
    Metric("time to write a version", lambda run: _mean(run, "rollout_write_ms"), milliseconds),
    Metric("largest age of weights of rollout workers, mean", lambda run: _mean(run, "rollout_age_ms"), milliseconds),
    Metric("versions by which rollouts are behind", lambda run: _mean(run, "rollout_lag"), "{:.2f}".format),
    Metric("cosine similarity to the true mean gradient", lambda run: _mean(run, "cosine"), "{:.4f}".format, False),
    Metric("peak memory of a rank", lambda run: _last(run, "memory_bytes"), gibibytes),
    Metric("optimizer steps", lambda run: run.last_step, "{:,}".format, compared=False),
    Metric("parameters", _of_summary("parameters"), "{:,}".format, compared=False),
    Metric("processes", _of_summary("world_size"), str, compared=False),
)


def table_head(runs: list[Run]) -> list[str]:
    """Return the column titles of `table_rows`."""
    return ["", *[run.name for run in runs], *(["change"] if len(runs) > 1 else [])]


def table_rows(runs: list[Run], metrics: Iterable[Metric] = METRICS) -> list[list[str]]:
    """Return rows of text: the name, one figure per run, and with a baseline the relative change."""
    found = [(metric, *metric.row(runs)) for metric in metrics]
    return [
        [title, *(UNKNOWN if value is None else metric.form(value) for value in values), *_change(is_compared, values)]
        for metric, title, values, is_compared in found
        if any(value is not None and (value or not metric.optional) for value in values)
    ]


def tiles(runs: list[Run]) -> list[tuple[str, str, str]]:
    """Return the most important figures of the run.

    Returns:
        Tuples of title, value, and the baseline's value (empty without a baseline).
    """
    found = [
        cells
        for cells in table_rows(runs, (metric for metric in METRICS if metric.tile))
        if cells[len(runs)] != UNKNOWN
    ]
    if len(runs) == 1:
        return [(title, value, "") for title, value in found]
    return [
        (title, value, f"{base} {runs[0].name}{f' ({change})' if change else ''}" if base != UNKNOWN else "")
        for title, base, value, change in found
    ]


def _change(is_compared: bool, values: list[float | None]) -> list[str]:
    if len(values) == 1:
        return []
    before, after = values
    return [change(after / before - 1) if is_compared and before and after is not None else ""]
