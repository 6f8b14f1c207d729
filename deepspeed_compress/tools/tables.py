"""Tables on the terminal, all in one style."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 160
"""Width of the output in columns if it is not a terminal."""


def new_console(least: int = 0) -> Console:
    """Return a console for tables. On a terminal, it is as wide as the terminal, but at least `least` columns."""
    return Console(width=max(Console().width, least) if sys.stdout.isatty() else WIDTH)


def new_table(title: str, columns: Iterable[str], texts: Collection[str] = (), caption: str | None = None) -> Table:
    """Return an empty table. The columns named in `texts` are aligned left, all others hold figures."""
    table = Table(
        title=escape(title),
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        is_text = column in texts
        table.add_column(escape(column), justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def print_table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], texts: Collection[str] = (), least: int = 0
) -> None:
    """Print a table of plain texts below its title, if any. See `new_table` and `new_console`."""
    table = new_table("", columns, texts)
    for row in rows:
        table.add_row(*map(escape, row))
    if title:
        # The title of a table would be wrapped to its width.
        print(title)
    new_console(least).print(table)
