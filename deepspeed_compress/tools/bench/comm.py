"""`bench comm`: latency and bandwidth of collectives, or the rate from which on compressed activations cost time.

Messages are measured on emulated hosts or in the processes of a launcher.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from rich.table import Table

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.policy.measurement import AlphaBeta
from deepspeed_compress.tools.bench.jobs import Row, find_ranks, new_document, save_document
from deepspeed_compress.tools.bench.links import UNLIMITED, bits_per_second
from deepspeed_compress.tools.plots import COLOURS, WIDTH, check_plotting, new_figure, save_figure, style_axes
from deepspeed_compress.tools.tables import new_console, new_table

RANK_PROGRAM = "deepspeed_compress.tools.bench.comm_rank"
CAPTION = "bus: minimum bytes that a rank must send, per second; link: fraction of the link's rate"


def run(options: argparse.Namespace) -> int:
    """Measure, print, write and draw. Return exit code 1 if the run failed, else 0."""
    activations = options.kind != "collectives"
    if options.plot and activations:
        raise ConfigError("--plot: draws collectives only; leave it out, or write --kind collectives")
    if options.plot:
        check_plotting("--plot")
    if not activations and len(set(options.sizes)) < 2:
        raise ConfigError(
            f"--sizes {options.sizes}: latency and bandwidth need at least two different sizes; write another one"
        )
    with find_ranks(options.emulate, options.timeout, "bench comm") as ranks:
        job = {"kind": options.kind, "rates": ranks.rates, "sizes": options.sizes}
        rows, failure = ranks.run(RANK_PROGRAM, job)
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
    if options.plot:
        plot_comm(rows, heading, options.plot)


def table_of(heading: str, rows: Sequence[Row]) -> Table:
    """Return the table of the rows measured at one rate."""
    rate = rows[0]["rate"]
    title = f"{heading}{f' at {rate}' if rate else ''}"
    columns = ("latency ms", "bus MB/s", "link", "fit error", *(f"{_short(size)} ms" for size in rows[0]["sizes"]))
    table = new_table(title, ("collective", *columns), ["collective"], CAPTION)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    limited = row["rate"] not in (None, UNLIMITED)
    bus, link = row["fitted_bus_bytes_per_s"], bits_per_second(row["rate"]) / 8 if limited else None
    return [
        row["collective"],
        f"{1e3 * row['fit']['latency']:.2f}",
        shown(bus, ",.1f", 1e-6),
        shown(bus / link if bus and link else None, ".2f"),
        f"{100 * row['fit']['error']:.0f} %",
        *(f"{1e3 * seconds:.2f}" for seconds in row["seconds"]),
    ]


def _short(size: int) -> str:
    """Return `size` as text, in the largest unit of which it is a multiple."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def plot_comm(rows: Sequence[Row], heading: str, file: Path) -> None:
    """Plot time against size with the fitted lines: one chart per rate, one color per collective."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure = new_figure(WIDTH, 4.5 * len(rates))
    for place, rate in enumerate(rates, 1):
        axes = figure.add_subplot(len(rates), 1, place)
        for index, row in enumerate(row for row in rows if row["rate"] == rate):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(row["sizes"], row["seconds"], "o", color=colour, label=row["collective"], markersize=4)
            line = AlphaBeta(**row["fit"])
            axes.plot(row["sizes"], [line.seconds(size) for size in row["sizes"]], color=colour, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes of a rank's buffer", fontsize=9)
        axes.set_ylabel("seconds", fontsize=9)
        style_axes(axes, f"{heading}{f' at {rate}' if rate else ''}")
    save_figure(figure, file)


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
