"""A run as a page and a picture, alone or next to a baseline.

``python -m deepspeed_compress.report RUN [--baseline RUN] [--output DIR]`` writes report.html, which needs no
other file and no network, and report.png, and prints the table of figures.
"""

import argparse
import sys
from pathlib import Path

from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.report.page import page
from deepspeed_compress.report.picture import draw
from deepspeed_compress.report.runs import Run, load_runs, table_head, table_rows

__all__ = ["main", "print_table", "write_report"]


def write_report(run_dir: Path, baseline: Path | None, output: Path) -> tuple[Path, Path]:
    """Write report.html and report.png into the directory `output`; return their paths.

    Raises DataError when a run has no summary.json, or the plotting packages are missing.
    """
    runs = load_runs(run_dir, baseline)
    try:
        import matplotlib.figure  # noqa: F401
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise DataError(f"a report needs {error.name}; write: pip install 'deepspeed-compress[plot]'") from None
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


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when a run cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_compress.report", description=__doc__)
    parser.add_argument("run", type=Path, help="output directory of a run")
    parser.add_argument("--baseline", type=Path, help="output directory of the run to compare with")
    parser.add_argument("--output", type=Path, help="where the report goes (default: the run's directory)")
    options = parser.parse_args(argv)
    try:
        written, picture = write_report(options.run, options.baseline, options.output or options.run)
        print_table(load_runs(options.run, options.baseline))
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {written}\npicture: {picture}")
    return 0
