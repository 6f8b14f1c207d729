"""`bench comm`: latency and bandwidth of collectives, or the rate from which on compressed activations cost time.

Messages are measured on emulated hosts or in the processes of a launcher.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain

from rich.table import Table

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.jobs import Row, find_ranks, new_document, save_document
from deepspeed_compress.tools.bench.links import UNLIMITED, bits_per_second
from deepspeed_compress.tools.tables import new_console, new_table

CAPTION = "bus: minimum bytes that a rank must send, per second; link: fraction of the link's rate"


def run(options: argparse.Namespace) -> int:
    """Measure, print and write. Return exit code 1 if the run failed, else 0."""
    if options.kind == "collectives" and len(set(options.sizes)) < 2:
        raise ConfigError(f"--sizes {options.sizes}: latency and bandwidth need at least two different sizes; add one")
    with find_ranks(options.emulate, options.timeout, "bench comm") as ranks:
        measure = "collectives" if options.kind == "collectives" else "activations"
        job = {"measure": measure, "kind": options.kind, "rates": ranks.rates, "sizes": options.sizes}
        rows, failure = ranks.run([job])
    if rows and ranks.is_first:
        _show(rows, options)
    return int(failure is not None)


def _show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    console, heading = new_console(), f"collectives on {rows[0]['ranks']} ranks"
    if options.kind == "collectives":
        for rate in dict.fromkeys(row["rate"] for row in rows):
            console.print(table_of(heading, [row for row in rows if row["rate"] == rate]))
    else:
        for row in rows:
            console.print(crossover_table(row))
            print(*verdicts(row), sep="\n")
    if options.json:
        save_document(new_document(rows), options.json)


def table_of(heading: str, rows: Sequence[Row]) -> Table:
    """Return the table of the rows measured at one rate."""
    rate = rows[0]["rate"]
    title = f"{heading}{f' at {rate}' if rate else ''}"
    columns = ("latency ms", "bus MB/s", "link", "fit error", *(f"{_short(size)} ms" for size in rows[0]["sizes"]))
    table = new_table(title, ("collective", *columns), ["collective"], CAPTION)
    link = None if rate in (None, UNLIMITED) else bits_per_second(rate) / 8
    for row in rows:
        bus = row["fitted_bus_bytes_per_s"]
        table.add_row(
            row["collective"],
            _milliseconds(row["fit"]["latency"]),
            shown(bus, ",.1f", 1e-6),
            shown(bus / link if bus and link else None, ".2f"),
            f"{100 * row['fit']['error']:.0f} %",
            *map(_milliseconds, row["seconds"]),
        )
    return table


def _short(size: int) -> str:
    """Return `size` as text, in the largest unit of which it is a multiple."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


CROSSOVER_CAPTION = "milliseconds of a message on the slowest rank, with encoding and decoding"


def crossover_table(row: Row) -> Table:
    """Return the table of one rate: a line for each size."""
    rate = f" at {row['rate']}" if row["rate"] else ""
    bits = list(dict.fromkeys(one["bits"] for one in row["messages"]))
    columns = ("elements", "bf16", *(name for one in bits for name in (f"{one} bits", "saves")))
    table = new_table(f"{row['kind']}, {row['ranks']} ranks{rate}", columns, caption=CROSSOVER_CAPTION)
    for numel in dict.fromkeys(one["numel"] for one in row["messages"]):
        same = [one for one in row["messages"] if one["numel"] == numel]
        plain = min(one["plain"] for one in same)
        cells = ((_milliseconds(one["compressed"]), f"{1 - one['compressed'] / plain:.0%}") for one in same)
        table.add_row(f"{numel:,}", _milliseconds(plain), *chain.from_iterable(cells))
    return table


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
