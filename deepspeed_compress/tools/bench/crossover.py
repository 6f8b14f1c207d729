"""`bench comm --kind`: the rate of a link from which on compressed activations cost time."""

from collections.abc import Iterator
from itertools import chain

from rich.table import Table

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.tools.bench.rows import Row
from deepspeed_compress.tools.tables import new_table

RANK_PROGRAM = "deepspeed_compress.tools.bench.crossover_rank"
CAPTION = "milliseconds of a message on the slowest rank, with encoding and decoding"


def table_of(row: Row) -> Table:
    """Return the table of one rate: a line for each size."""
    rate = f" at {row['rate']}" if row["rate"] else ""
    bits = list(dict.fromkeys(one["bits"] for one in row["messages"]))
    columns = ("elements", "bf16", *(name for one in bits for name in (f"{one} bits", "saves")))
    table = new_table(f"{row['kind']}, {row['ranks']} ranks{rate}", columns, caption=CAPTION)
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
