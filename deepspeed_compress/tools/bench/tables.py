"""Tables of benchmarks, and the console on which they are printed."""

import sys
from collections.abc import Collection, Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 132
"""Width of the output in columns if it is not a terminal."""


def new_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def new_table(title: str, caption: str, columns: Iterable[str], texts: Collection[str] = ()) -> Table:
    """Return an empty table. The columns named in `texts` are aligned left, all others right."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    return table
