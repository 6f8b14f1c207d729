"""`ds-compress report`: an HTML page of a run, optionally compared with a baseline."""

import argparse
from pathlib import Path

from deepspeed_compress.tools.outputs.report import printable
from deepspeed_compress.tools.report.figures import table_head, table_rows
from deepspeed_compress.tools.report.page import page
from deepspeed_compress.tools.report.runs import Run, load_runs
from deepspeed_compress.tools.tables import print_table

__all__ = ["load_runs", "page", "print_figures", "run"]


def run(options: argparse.Namespace) -> int:
    """Write `report.html`, then print the table of figures and the path of the page."""
    runs = load_runs(options.run_dir, options.baseline)
    file: Path = (options.output or options.run_dir) / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(runs), encoding="utf-8", errors="replace")
    print_figures(runs)
    print(printable(str(file)))
    return 0


def print_figures(runs: list[Run]) -> None:
    """Print the figures to the terminal."""
    print_table("final figures", table_head(runs), table_rows(runs), ("",))
