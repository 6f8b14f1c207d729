"""`bench comm --kind`: the rate of a link from which on compressed activations cost time."""

import argparse
from collections.abc import Iterator, Sequence

from rich.table import Table

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.rows import Row, new_document, run_ranks, save_document
from deepspeed_compress.tools.bench.tables import new_console, new_table

RANK_PROGRAM = "deepspeed_compress.tools.bench.crossover_rank"
CAPTION = "milliseconds of a message on the slowest rank, with encoding and decoding"


def run(options: argparse.Namespace) -> int:
    """Measure, print and write. Return exit code 1 if the run failed, else 0."""
    if options.plot:
        raise ConfigError("--plot: draws collectives only; leave it out, or write --kind collectives")
    rates = options.emulate.rates if options.emulate else [None]
    rows, failed = run_ranks(options, RANK_PROGRAM, {"kind": options.kind, "rates": rates, "sizes": options.sizes})
    if rows:
        _show(rows)
    if rows and options.json:
        save_document(new_document(rows), options.json)
    return int(failed)


def _show(rows: Sequence[Row]) -> None:
    console = new_console()
    for row in rows:
        console.print(table_of(row))
        for line in verdicts(row):
            print(line)


def table_of(row: Row) -> Table:
    """Return the table of one rate: a line for each size."""
    rate = f" at {row['rate']}" if row["rate"] else ""
    bits = list(dict.fromkeys(one["bits"] for one in row["messages"]))
    columns = ("elements", "bf16", *(name for one in bits for name in (f"{one} bits", "saves")))
    table = new_table(f"{row['kind']}, {row['ranks']} ranks{rate}", CAPTION, columns)
    for numel in dict.fromkeys(one["numel"] for one in row["messages"]):
        same = [one for one in row["messages"] if one["numel"] == numel]
        plain = min(one["plain"] for one in same)
        table.add_row(f"{numel:,}", _milliseconds(plain), *_cells(same, plain))
    return table


def _cells(messages: Sequence[Row], plain: float) -> Iterator[str]:
    for one in messages:
        yield _milliseconds(one["compressed"])
        yield f"{1 - one['compressed'] / plain:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def verdicts(row: Row) -> Iterator[str]:
    """Yield, for each number of bits, the rate below which the largest message is faster compressed."""
    largest = max(one["numel"] for one in row["messages"])
    for one in row["messages"]:
        if one["numel"] == largest:
            here = "saves time" if one["compressed"] < one["plain"] else "costs time"
            limit = shown(one["rate"], ".2g", 8e-9, " Gbit/s")
            yield f"{one['bits']} bits: {here} on this link; pays below about {limit} per rank"
