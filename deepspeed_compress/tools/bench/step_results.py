"""Output of `bench step`: tables of times and bytes, and bars."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.tools.bench.jobs import Row
from deepspeed_compress.tools.bench.workload import COMPUTE_ONLY, stage_of
from deepspeed_compress.tools.plots import plot_bars
from deepspeed_compress.tools.tables import new_console, new_table

Cells = dict[str, str]
"""Cells of a table by column."""


@dataclass(frozen=True)
class Form:
    """Form of a table: functions that return all cells of a contender, and those of pure computation that it has."""

    caption: str
    cells: Callable[[Row], Cells]
    compute_only: Callable[[Row], Cells]


def print_steps(rows: Sequence[Row]) -> None:
    """Print tables of times and of sizes for every workload and number of ranks."""
    console = new_console()
    for work in dict.fromkeys(same_work(row) for row in rows):
        same = [row for row in rows if same_work(row) == work]
        for form in (*FORMS, *([TRACES] if any("shares" in row for row in same) else [])):
            console.print(step_table(same, form))


def same_work(row: Row) -> str:
    """Return a key that is equal for rows that can be compared."""
    return json.dumps([row["ranks"], row.get("per_host", 1), row.get("mirror", False), row["workload"]], sort_keys=True)


def title(row: Row) -> str:
    """Return the title of a table: what all its rows have in common."""
    work = row["workload"]
    layout = "".join(f", {name} {work[name]}" for name in ("pipeline", "tensor", "sequence") if work[name] > 1)
    batch = f"{work['accumulation']} x {work['micro_batch']} x {work['seq_len']} tokens"
    kinds = {True: " (a mirror)", False: ""}
    mirror = kinds.get(row.get("mirror", False), " (computed network, measured device)")
    ranks = f"{row['ranks']} ranks" + (f", {row['per_host']} on a host" if row.get("per_host", 1) > 1 else "")
    return f"{work['model']} in {work['precision']} on {ranks}{mirror}{layout}, {batch}"


def step_table(rows: Sequence[Row], form: Form) -> Table:
    """Return one table. Rows of the same rate are adjacent and follow the step time of pure computation."""
    columns = list(form.cells(rows[0]))
    table = new_table(title(rows[0]), ("rate", "ZeRO", "method", *columns), ["method"], form.caption)
    for index, row in enumerate(rows):
        rate, stage = row["rate"] or "-", stage_of(row["contender"]["ds_config"])
        if index == 0 or rows[index - 1]["rate"] != row["rate"]:
            table.add_section()
            alone = form.compute_only(row)
            table.add_row(rate, "-", COMPUTE_ONLY, *(alone.get(column, "") for column in columns))
        zero = "-" if stage is None else str(stage)
        table.add_row(rate, zero, row["contender"]["name"], *form.cells(row).values())
    return table


def _time_cells(row: Row) -> Cells:
    split = row["split_ms"] or {}
    ratios = {"/ compute": shown(row["of_compute_only"], ".2f"), "speed-up": shown(row["speedup"], ".2f")}
    return _seconds(row["step_s"]) | ratios | {column: shown(split.get(name), ".1f") for column, name in PHASES.items()}


def _seconds(found: Row) -> Cells:
    return {"seconds": f"{found['median']:.3f}", "min": f"{found['min']:.3f}", "max": f"{found['max']:.3f}"}


def _size_cells(row: Row) -> Cells:
    sizes = row["bytes"]
    sent = {name: shown(sizes.get(name), ",.3f", 1e-6) for name in ("interface", "headers", "payload", "predicted")}
    memory = {"peak": _megabytes(row["peak_bytes"]), "residuals": _megabytes(row["residual_bytes"])}
    return sent | {"diff": shown(sizes.get("difference_percent"), "+.2f")} | memory


def _share_cells(row: Row) -> Cells:
    shares = row.get("shares", {})
    return {name: shown(shares.get(name), ".1f", 100) for name in SHARES}


def _megabytes(values: Sequence[float | None]) -> str:
    """Return the mean of the known `values`, in MB."""
    known = [value for value in values if value is not None]
    return shown(statistics.fmean(known) if known else None, ",.1f", 1e-6)


def plot_steps(rows: Sequence[Row], file: Path) -> None:
    """Plot the ratio to pure computation: one chart per workload, one group of bars per method, one color per rate."""
    charts = [[row for row in rows if same_work(row) == work] for work in dict.fromkeys(map(same_work, rows))]
    bars = [(title(chart[0]), _ratios(chart)) for chart in charts]
    plot_bars(bars, "step time / pure computation (1 = the network costs nothing)", file)


def _ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the ratios by rate and method."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        stage = stage_of(row["contender"]["ds_config"])
        name = row["contender"]["name"]
        label = name if stage is None or f"zero{stage}" in name else f"{name}, ZeRO {stage}"
        found.setdefault(row["rate"] or "this network", {})[label] = row["of_compute_only"]
    return found


SHARES = ("encode", "decode", "exchange", "idle")
PHASES = {"compute": "compute", "compress": "compress", "wait": "communicate", "decompress": "decompress"}
"""Columns of the parts of a step, with their names in a row."""
FORMS = (
    Form(
        "step time in seconds (median and range), relative to pure computation, speed-up over DeepSpeed, parts in ms",
        _time_cells,
        lambda row: _seconds(row["compute_only_s"]),
    ),
    Form(
        "MB that a host sends per step; diff: payload compared with the prediction, in %; memory in MB",
        _size_cells,
        lambda row: {"peak": _megabytes(row["compute_only_peak_bytes"])},
    ),
)
TRACES = Form(
    "% of a traced step of rank 0: to encode, to decode, to exchange; and the time that the GPU's busiest stream idles",
    _share_cells,
    lambda _: {},
)
"""Form of the table of traces, for rows that have one."""
