#!/usr/bin/env python3
"""Step times and bytes on rate-limited hosts: DeepSpeed alone and with compression, against the bare model.

Every combination of hosts and ZeRO stage is one launched run. In it the ranks measure, in the same processes, the step
of the bare model (no communication), then each method at each rate; they change the rate of their own link. What is in
the output file already is not measured again. Needs Linux, root and iproute2; see docs/testbed.md.

examples:
  python launch/testbed/bench.py --hosts 2 --stages 0 1 2 3 --rates 1gbit 100mbit --output runs/testbed.json
  python launch/testbed/bench.py --hosts 2 4 --stages 2 --methods deepspeed int4 configs/zero2_topk.json --output t.json
  python launch/testbed/bench.py --rates 100mbit --steps 1 --model configs/models/gpt_2m.json --output short.json
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError, Run, bits_per_second, check_machine, signals_as_exceptions
from job import DEEPSPEED, PROGRESS, SECTIONS, Job
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deepspeed_compress.config import SECTION, read_ds_config
from deepspeed_compress.errors import CompressError

HEADER_BYTES = 14 + 20 + 32
"""Of every packet: Ethernet, IPv4, TCP with timestamps."""
FAST, MANY_STEPS, FEW_STEPS = 500e6, 7, 3
"""Measured steps where --steps is not given: many from this rate (bits per second) on, few below."""
IDENTITY = ("hosts", "stage", "rate", "method", "section")
"""What makes a row the same measurement."""
COLUMNS = ("interface", "headers", "payload", "predicted")
"""Of the bytes in the table."""

Row = dict[str, Any]


def main() -> int:
    options = _options()
    try:
        check_machine()
        sections = dict(_section(name) for name in options.methods)
        steps = _steps(options)
        document = _read(options)
        with signals_as_exceptions():
            failures = _measure_missing(options, sections, steps, document)
    except (ClusterError, CompressError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 132).print(_table(document["rows"]))
    return int(failures > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="of every link, as tc writes them")
    methods = f"of {', '.join(SECTIONS)}, or a ds_config.json whose {SECTION} section is taken (default: the three)"
    parser.add_argument("--methods", nargs="+", default=list(SECTIONS), metavar="METHOD", help=methods)
    steps = f"measured at each rate: one number, or one a rate (default: {MANY_STEPS}, or {FEW_STEPS} below 500 Mbit/s)"
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help=steps)
    parser.add_argument("--model", default="configs/models/gpt_10m.json", help="config of a Hugging Face causal LM")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences on each host (default: 4)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a sequence (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="of one run (default: 900)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="written after every run")
    return parser.parse_args()


def _section(method: str) -> tuple[str, Row | None]:
    """Name and section of a method as given on the command line. Raises ConfigError for an unreadable file."""
    if method in SECTIONS:
        return method, SECTIONS[method]
    section = dict(read_ds_config(method).get(SECTION, {}))
    section.pop("parallelism", None)  # --stages says it
    return Path(method).stem, section


def _steps(options: argparse.Namespace) -> dict[str, int]:
    """Measured steps by rate. Raises ClusterError for a wrong rate or number of steps."""
    fast = {rate: bits_per_second(rate) >= FAST for rate in options.rates}
    given = options.steps or [MANY_STEPS if fast[rate] else FEW_STEPS for rate in options.rates]
    if len(given) not in (1, len(options.rates)) or min(given) < 1:
        raise ClusterError(f"--steps {given}: write one number, or one for each of the rates {options.rates}")
    return dict(zip(options.rates, given * len(options.rates), strict=False))


def _read(options: argparse.Namespace) -> Row:
    """The output file, or a new document. Raises ClusterError when it holds measurements of something else."""
    settings = {name: getattr(options, name) for name in ("model", "micro_batch", "seq_len", "seed")}
    if not options.output.is_file():
        return {"settings": settings, "environment": _environment(), "header_bytes": HEADER_BYTES, "rows": []}
    document: Row = json.loads(options.output.read_text(encoding="utf-8"))
    if document["settings"] != settings:
        raise ClusterError(f"{options.output} was measured with {document['settings']}; name another --output")
    return document


def _environment() -> Row:
    versions = {package: version(package) for package in ("torch", "deepspeed", "transformers")}
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    } | versions


def _measure_missing(options: argparse.Namespace, sections: Row, steps: dict[str, int], document: Row) -> int:
    """Measure what `document` lacks and write it after every run; returns the number of runs that failed."""
    runs = [(hosts, stage) for hosts in options.hosts for stage in options.stages]
    failures, begin = 0, time.monotonic()
    for number, (hosts, stage) in enumerate(runs, 1):
        label = f"[{number}/{len(runs)}, {time.monotonic() - begin:.0f} s] {hosts} hosts, ZeRO {stage}"
        rates = [rate for rate in steps if _missing(document["rows"], hosts, stage, rate, sections)]
        if not rates:
            print(f"{label}: in {options.output} already", flush=True)
            continue
        print(f"{label}: {', '.join(rates)}", flush=True)
        rows, failure = _launch(options, hosts, stage, {rate: steps[rate] for rate in rates}, sections)
        failures += failure
        _merge(document, rows)
        _save(document, options.output)
    return failures


def _missing(rows: list[Row], hosts: int, stage: int, rate: str, sections: Row) -> bool:
    present = [[row[name] for name in IDENTITY] for row in rows]
    return any([hosts, stage, rate, *method] not in present for method in sections.items())


def _launch(
    options: argparse.Namespace, hosts: int, stage: int, steps: dict[str, int], sections: Row
) -> tuple[list[Row], bool]:
    """One run on a cluster of its own: the rows that it got to, and whether it failed."""
    with tempfile.TemporaryDirectory() as directory, Cluster(hosts) as cluster:
        result = Path(directory) / "rows.jsonl"
        size = {"micro_batch": options.micro_batch, "seq_len": options.seq_len, "seed": options.seed}
        job = Job(stage, tuple(steps), tuple(steps.values()), sections, options.model, **size, result=str(result))
        program = Path(__file__).with_name("bench_rank.py")
        run = cluster.run([sys.executable, str(program), job.to_json()], timeout=options.timeout, on_line=_progress)
        rows = [json.loads(line) for line in result.read_text().splitlines()] if result.is_file() else []
    _report_failure(run)
    return [row | {"section": sections[row["method"]]} for row in rows], run.failure is not None


def _progress(line: str) -> None:
    if line.startswith(PROGRESS):
        print("  " + line.removeprefix(PROGRESS), end="", flush=True)


def _report_failure(run: Run) -> None:
    if run.failure is None:
        return
    for host, output in enumerate(run.outputs):
        print(f"--- host {host}, last lines\n{output[-2000:]}", file=sys.stderr)
    print(f"error: {run.failure} after {run.seconds:.0f} s; what it measured before is kept", file=sys.stderr)


def _merge(document: Row, rows: Sequence[Row]) -> None:
    """New rows replace those of the same measurement; figures that compare rows are made anew."""
    merged = {json.dumps([row[name] for name in IDENTITY]): row for row in [*document["rows"], *rows]}
    document["rows"] = sorted(merged.values(), key=_order)
    for row in document["rows"]:
        row |= _compared(row, document["rows"])


def _order(row: Row) -> tuple[Any, ...]:
    return (
        row["hosts"],
        row["stage"],
        -bits_per_second(row["rate"]),
        row["method"] != DEEPSPEED,
        row["method"],
    )


def _compared(row: Row, rows: Sequence[Row]) -> Row:
    """Ratios of times, and the bytes of a step: means over the ranks, but the greatest difference of any rank."""
    siblings = [other for other in rows if all(other[name] == row[name] for name in ("hosts", "stage"))]
    alone = next((other for other in siblings if (other["method"], other["rate"]) == (DEEPSPEED, row["rate"])), None)
    step = row["step_s"]["median"]
    return {
        "of_compute_only": step / row["compute_only_s"]["median"],
        "speedup": alone["step_s"]["median"] / step if alone else None,
        "bytes": _bytes(row["traffic"], _predictions(row, siblings)),
    }


def _predictions(row: Row, siblings: Sequence[Row]) -> list[float] | None:
    """Payload of every rank as `deepspeed_compress` counts it; DeepSpeed alone is predicted by the other methods."""
    counted = next((other["traffic"] for other in siblings if other["section"] is not None), None)
    if row["section"] is not None:
        return [rank["gradients"] + rank["weights"] for rank in row["traffic"]]
    return [rank["uncompressed"] + rank["weights"] for rank in counted] if counted else None


def _bytes(traffic: Sequence[Row], predictions: Sequence[float] | None) -> Row:
    payloads = [rank["interface"] - HEADER_BYTES * rank["packets"] for rank in traffic]
    differences = [100 * (sent / said - 1) for sent, said in zip(payloads, predictions or (), strict=False)]
    return {
        "interface": statistics.mean(rank["interface"] for rank in traffic),
        "headers": HEADER_BYTES * statistics.mean(rank["packets"] for rank in traffic),
        "headers_on_wire": HEADER_BYTES * statistics.mean(rank["segments"] for rank in traffic),
        "payload": statistics.mean(payloads),
        "predicted": statistics.mean(predictions) if predictions else None,
        "difference_percent": max(differences, key=abs) if predictions else None,
    }


def _save(document: Row, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, output)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        title="a step: median seconds and their range; MB that a host sends", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("hosts", "ZeRO", "rate", "method", "seconds", "min", "max", "/ compute", "speed-up"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for name in (*COLUMNS, "diff"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is None or following["stage"] != row["stage"] or following["hosts"] != row["hosts"]
        table.add_row(*_cells(row), end_section=ends)
    return table


def _cells(row: Row) -> list[str]:
    seconds = [f"{row['step_s'][name]:.3f}" for name in ("median", "min", "max")]
    ratios = [_text(row["of_compute_only"], ".2f"), _text(row["speedup"], ".2f")]
    counts = [_text(row["bytes"][name], ",.3f", scale=1e-6) for name in COLUMNS]
    difference = _text(row["bytes"]["difference_percent"], "+.2f") + " %"
    return [str(row["hosts"]), str(row["stage"]), row["rate"], row["method"], *seconds, *ratios, *counts, difference]


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(scale * value, form)


if __name__ == "__main__":
    sys.exit(main())
