"""`bench step`: measure steps, and compare the rows."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from deepspeed_compress.config import SECTION, with_preset
from deepspeed_compress.config.numbers import shown
from deepspeed_compress.config.problems import value_at
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.jobs import JobRanks, LaunchedRanks, Row, find_ranks, new_document, save_document
from deepspeed_compress.tools.bench.links import bits_per_second
from deepspeed_compress.tools.bench.workload import (
    COMPUTE_ONLY,
    DEEPSPEED,
    OURS,
    Contender,
    Group,
    group_contenders,
    stage_of,
    without_section,
)
from deepspeed_compress.tools.tables import new_console, new_table

HEADER_BYTES = 14 + 20 + 32
"""Header bytes per packet: Ethernet, IPv4, and TCP with timestamps."""
FAST, MANY_STEPS, FEW_STEPS = 500e6, 7, 3
"""Default numbers of measured steps: many from this rate (bits per second) on, few below it."""

Steps = dict[str | None, int]
"""Number of measured steps by rate. The rate is None if links are not limited."""


def run(options: argparse.Namespace) -> int:
    """Measure, save and print. Return exit code 1 if a run failed, else 0.

    Under a launcher, only rank 0 writes the file.

    Raises:
        ConfigError: The file exists, or the options contradict each other.
    """
    if options.output.exists():
        raise ConfigError(f"--output {options.output}: exists, and a file holds one run; write another one")
    if options.mirror:
        _check_mirrored(_groups(options, options.mirror))
    mirror = LaunchedRanks(options.mirror) if options.mirror else None
    with mirror or find_ranks(options.emulate, options.timeout, "bench step") as ranks:
        rows, failures = _measure(options, ranks)
    if ranks.is_first:
        print_steps(rows)
    return int(failures > 0)


def _measure(options: argparse.Namespace, ranks: JobRanks) -> tuple[list[Row], int]:
    """Measure all groups, and save what is measured after each. Return the rows, and the number of runs that failed."""
    groups, steps = _groups(options, ranks.count), steps_at(options, ranks.rates)
    layouts = {(group.workload.tensor, group.workload.pipeline) for group in groups}
    if not options.emulate and len(layouts) > 1:
        raise ConfigError("--config: the files have different layouts, which one job cannot measure; pass them apart")
    begin, failures, found = time.monotonic(), 0, list[Row]()
    for number, group in enumerate(groups, 1):
        if ranks.is_first:
            work = title({"ranks": ranks.count, "workload": asdict(group.workload)})
            rates = ", ".join(rate or "this network" for rate in steps)
            print(f"[{number}/{len(groups)}, {time.monotonic() - begin:.0f} s] {work}: {rates}", flush=True)
        rows, failure = ranks.run([group.to_job(steps)])
        failures += failure is not None
        found += compared(rows, bool(options.mirror))
        if ranks.is_first:
            save_document(new_document(found), options.output)
    return found, failures


def _check_mirrored(groups: Sequence[Group]) -> None:
    """Check that a mirror can stand for the other ranks.

    Raises:
        ConfigError: A peer uses collectives that the mirror lacks, or ranks hold different parts of a model.
    """
    others = sorted({one.name for group in groups for one in group.contenders if one.ds_config is None})
    if others:
        raise ConfigError(f"--mirror: --peers {' '.join(others)} cannot be mirrored, only DeepSpeed can; use --emulate")
    if any(group.workload.tensor * group.workload.pipeline > 1 for group in groups):
        raise ConfigError("--mirror: all ranks hold the same layers there; leave out /parallelism, or use --emulate")


def _groups(options: argparse.Namespace, ranks: int) -> list[Group]:
    stems = [Path(file).stem for file in options.config]
    if len(set(stems)) < len(stems):
        raise ConfigError(f"--config {' '.join(options.config)}: files of the same name share rows; rename them")
    sizes = {name: getattr(options, name) for name in ("micro_batch", "seq_len", "seed", "lora_rank")}
    groups = [
        group
        for model in options.model
        for group in group_contenders(options.config, model, options.peers, sizes, ranks)
    ]
    for group in groups:
        _ = group.workload.share  # raises before anything is measured
    return groups


def steps_at(options: argparse.Namespace, rates: Sequence[str | None]) -> Steps:
    """Return the number of measured steps for each of `rates`.

    Raises:
        ConfigError: --steps has neither one number nor one per rate.
    """
    fast = [rate is None or bits_per_second(rate) >= FAST for rate in rates]
    given = options.steps or [MANY_STEPS if quick else FEW_STEPS for quick in fast]
    if len(given) not in (1, len(rates)):
        raise ConfigError(f"--steps {given}: write one number, or one for each of the {len(rates)} rates")
    return dict(zip(rates, given * len(rates), strict=False))


def compared(rows: Sequence[Row], mirror: bool = False) -> list[Row]:
    """Return the rows of a run, fast rates first, with what their comparison shows. Rows of a `mirror` say so.

    Ratios of times are added, and the bytes per step: means over ranks, but the largest difference of any rank.
    """
    found = []
    for row in sorted(rows, key=lambda row: -bits_per_second(row["rate"]) if row["rate"] else 0.0):
        alone, step = _uncompressed(row, rows), row["step_s"]["median"]
        more = {
            "of_compute_only": step / row["compute_only_s"]["median"],
            "speedup": alone["step_s"]["median"] / step if alone else None,
            "bytes": _bytes(row["traffic"], _predictions(row, rows)),
        }
        found.append(row | more | ({"mirror": True} if mirror else {}))
    return found


def _uncompressed(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of the same configuration without its section, or None."""
    ds_config = row["contender"]["ds_config"]
    if ds_config is None:
        return None
    wanted = json.dumps(vars(Contender(DEEPSPEED, DEEPSPEED, without_section(ds_config))), sort_keys=True)
    same = (other for other in rows if other["rate"] == row["rate"])
    return next((other for other in same if json.dumps(other["contender"], sort_keys=True) == wanted), None)


def _predictions(row: Row, rows: Sequence[Row]) -> list[float] | None:
    """Return the payload bytes of every rank as the package counts them.

    For DeepSpeed, they are taken from a row that gathers weights in the same way. If a host has several ranks, a part
    of what they send stays inside it, except with hybrid sharding, for which the bytes of a host are returned.
    """
    per_host = row.get("per_host", 1)
    within = value_at(row["contender"]["ds_config"], (SECTION, "parallelism", "shard_within"))
    if per_host > 1 and within is None:
        return None
    if "predicted" in row["traffic"][0]:
        return [per_host * rank["predicted"] for rank in row["traffic"]]
    counted = next((other for other in rows if _counts_for(other, row, rows)), None)
    return [rank["predicted_uncompressed"] for rank in counted["traffic"]] if counted else None


def _counts_for(other: Row, row: Row, rows: Sequence[Row]) -> bool:
    if other["contender"]["kind"] != OURS or other["rate"] != row["rate"] or _uncompressed(other, rows) is not row:
        return False
    section = with_preset(other["contender"]["ds_config"])
    # Islands do not exchange the gradients of all ranks, and `auto` may leave them to DeepSpeed.
    whole = not section.get("islands") and "auto" not in section
    return whole and value_at(section, ("weights", "method")) in (None, "none")


def _bytes(traffic: Sequence[Row], predictions: Sequence[float] | None) -> Row:
    """Return the counted and predicted bytes, as far as they are known."""
    predicted = {"predicted": statistics.mean(predictions)} if predictions else {}
    if "interface" not in traffic[0]:
        return predicted
    payloads = [rank["interface"] - HEADER_BYTES * rank["packets"] for rank in traffic]
    differences = [100 * (sent / size - 1) for sent, size in zip(payloads, predictions or (), strict=False) if size]
    counted = {
        "interface": statistics.mean(rank["interface"] for rank in traffic),
        "headers": HEADER_BYTES * statistics.mean(rank["packets"] for rank in traffic),
        "headers_on_wire": HEADER_BYTES * statistics.mean(rank["segments"] for rank in traffic),
        "payload": statistics.mean(payloads),
    }
    return counted | predicted | ({"difference_percent": max(differences, key=abs)} if differences else {})


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
        for form in FORMS:
            console.print(step_table(same, form))


def same_work(row: Row) -> str:
    """Return a key that is equal for rows that can be compared."""
    return json.dumps([row["ranks"], row.get("per_host", 1), row.get("mirror", False), row["workload"]], sort_keys=True)


def title(row: Row) -> str:
    """Return the title of a table: what all its rows have in common."""
    work = row["workload"]
    layout = "".join(f", {name} {work[name]}" for name in ("pipeline", "tensor", "sequence") if work[name] > 1)
    batch = f"{work['accumulation']} x {work['micro_batch']} x {work['seq_len']} tokens"
    mirror = " (a mirror)" * row.get("mirror", False)
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


def _megabytes(values: Sequence[float | None]) -> str:
    """Return the mean of the known `values`, in MB."""
    known = [value for value in values if value is not None]
    return shown(statistics.fmean(known) if known else None, ",.1f", 1e-6)


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
