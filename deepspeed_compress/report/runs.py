"""What the directories of finished runs hold, and which of it is shown: charts, table rows, kinds of traffic."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.train.records import COMPRESSION, METRICS, read_lines, read_summary

__all__ = ["PANELS", "STACK", "Kind", "Panel", "Run", "load_runs", "table_head", "table_rows", "traffic"]

ACCENT, GREY = "#1f6feb", "#afb8c1"


@dataclass(frozen=True)
class Run:
    """What a run left behind, and how its line is drawn; a wide baseline shows below the run."""

    name: str
    colour: str
    width: float
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    compression: list[dict[str, Any]]

    def points(self, key: str, unit: float) -> tuple[list[float], list[float]]:
        """Steps, and values of `key` divided by `unit`, from whichever file has it."""
        lines = [line for line in self.metrics + self.compression if line.get(key) is not None]
        return [line["step"] for line in lines], [line[key] / unit for line in lines]


@dataclass(frozen=True)
class Panel:
    """One chart: `faint` and `strong` are keys in the run's files, their values are divided by `unit`."""

    title: str
    faint: str | None
    strong: str
    unit: float = 1.0
    from_zero: bool = True


@dataclass(frozen=True)
class Kind:
    """A kind of traffic: `key` in the summary, less what the key `part` has of it, if any."""

    title: str
    colour: str
    key: str
    part: str = ""

    def size(self, run: Run) -> float:
        """Mean bytes of a step."""
        return float(run.summary.get(self.key, 0) - run.summary.get(self.part, 0))


RAW = "bytes_raw_per_step"
KINDS = (
    Kind("gradients, compressed", ACCENT, "bytes_sent_per_step", RAW),
    Kind("gradients, uncompressed", "#a5c8ff", RAW),
    Kind("weights", "#2da44e", "bytes_weights_per_step"),
    Kind("activations between stages", "#d4a72c", "bytes_pipeline_per_step"),
    Kind("gradients of tied weights", "#e16f24", "bytes_tied_per_step"),
    Kind("tensor parallelism", "#8250df", "bytes_tensor_per_step"),
)
STACK = "Sent by one rank in a step, MB"

PANELS = (
    Panel("Loss: held-out, and training (faint)", "train_loss", "eval_loss", from_zero=False),
    Panel("Gradients sent per rank and step, MB", None, "bytes_sent", unit=1e6),
    Panel("Step time, s", None, "step_time_s"),
)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.3f} MB"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("held-out loss", "eval_loss", "{:.4f}".format),
    ("median step time", "median_step_s", "{:.3f} s".format),
    ("tokens per second", "tokens_per_s", "{:,.0f}".format),
    ("gradients sent per rank and step", "bytes_sent_per_step", _megabytes),
    ("compression ratio", "compression_ratio", "{:.2f}".format),
    *((f"sent: {kind.title}", kind.key, _megabytes) for kind in KINDS[1:]),
    ("optimizer steps", "steps", "{:,}".format),
    ("parameters", "parameters", "{:,}".format),
    ("processes", "world_size", str),
)
COMPARED = frozenset(
    {"eval_loss", "median_step_s", "tokens_per_s", "bytes_sent_per_step", *(kind.key for kind in KINDS)}
)
OPTIONAL = frozenset(kind.key for kind in KINDS[1:])
"""Rows that are left out where all runs have zero."""


def load_runs(run_dir: Path, baseline: Path | None) -> list[Run]:
    """The baseline, if any, then the run. Raises DataError when one is not finished."""
    if baseline is None:
        return [_load(run_dir, run_dir.resolve().name, ACCENT, 1.8)]
    former, name = _distinct_names(baseline.resolve(), run_dir.resolve())
    return [_load(baseline, former, GREY, 3.4), _load(run_dir, name, ACCENT, 1.8)]


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """The last parts of two paths, as many as tell them apart: none/seed0 and int4/seed0."""
    for count in range(1, min(len(first.parts), len(second.parts))):
        names = "/".join(first.parts[-count:]), "/".join(second.parts[-count:])
        if names[0] != names[1]:
            return names
    return str(first), str(second)


def table_rows(runs: list[Run]) -> list[list[str]]:
    """Rows of text: name, one figure a run, and with a baseline the change from it."""
    return [_row(runs, *row) for row in ROWS if any(_shown(run, row[1]) for run in runs)]


def table_head(runs: list[Run]) -> list[str]:
    """Column titles of `table_rows`."""
    return ["", *[run.name for run in runs], *(["change"] if len(runs) > 1 else [])]


def traffic(runs: list[Run]) -> list[tuple[Kind, list[float]]]:
    """Mean megabytes of a step by kind, one figure a run; without the kinds that no run has.

    None at all for runs whose statistics do not tell what is compressed.
    """
    told = all(RAW in run.summary for run in runs)
    found = [(kind, [kind.size(run) / 1e6 for run in runs]) for kind in KINDS if told]
    return [(kind, sizes) for kind, sizes in found if any(sizes)]


def _load(directory: Path, name: str, colour: str, width: float) -> Run:
    summary = read_summary(directory)
    # The summary says where compression.jsonl is, should the configuration have put it elsewhere.
    monitor = Path(summary.get("monitor_path") or directory)
    lines = read_lines(monitor / COMPRESSION)
    metrics = read_lines(directory / METRICS)
    return Run(name, colour, width, summary, metrics, lines)


def _shown(run: Run, key: str) -> bool:
    value = run.summary.get(key)
    return value is not None and (bool(value) or key not in OPTIONAL)


def _row(runs: list[Run], title: str, key: str, form: Callable[[Any], str]) -> list[str]:
    values = [run.summary.get(key) for run in runs]
    cells = ["-" if value is None else form(value) for value in values]
    change = [_change(values, key)] if len(runs) > 1 else []
    return [title, *cells, *change]


def _change(values: list[Any], key: str) -> str:
    if key not in COMPARED or None in values or not values[0]:
        return ""
    return f"{values[1] / values[0] - 1:+.2%}"
