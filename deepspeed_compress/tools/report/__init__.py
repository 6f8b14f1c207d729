"""A run as a page and a picture, alone or next to a baseline: ``ds-compress report``."""

import importlib.util
from pathlib import Path

from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.report.figures import table_head, table_rows
from deepspeed_compress.tools.report.page import page
from deepspeed_compress.tools.report.picture import draw
from deepspeed_compress.tools.report.reading import Run, load_runs

__all__ = ["load_runs", "print_table", "write_report"]


def write_report(runs: list[Run], output: Path) -> tuple[Path, Path]:
    """Write report.html and report.png on `runs`, of `load_runs`, into the directory `output`; return their paths.

    The page needs no other file and no network. Raises DataError when matplotlib, which draws the picture, is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DataError("a report needs matplotlib; write: pip install 'deepspeed-compress[plot]'")
    output.mkdir(parents=True, exist_ok=True)
    written, picture = output / "report.html", output / "report.png"
    written.write_text(page(runs), encoding="utf-8")
    draw(runs, picture)
    return written, picture


def print_table(runs: list[Run]) -> None:
    """The table of figures, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="final figures", title_justify="left")
    for index, title in enumerate(table_head(runs)):
        table.add_column(title, justify="right" if index else "left")
    for row in table_rows(runs):
        table.add_row(*row)
    Console().print(table)
