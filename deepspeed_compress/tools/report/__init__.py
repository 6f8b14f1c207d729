"""`ds-compress report`: an HTML page and a picture of a run, optionally compared with a baseline."""

import argparse
import sys
from pathlib import Path

from deepspeed_compress.tools import tables
from deepspeed_compress.tools.outputs.terminal import printable
from deepspeed_compress.tools.plots import INSTALL, can_plot
from deepspeed_compress.tools.report.drawing import draw_picture
from deepspeed_compress.tools.report.figures import table_head, table_rows
from deepspeed_compress.tools.report.page import page
from deepspeed_compress.tools.report.runs import Run, load_runs

__all__ = ["load_runs", "print_table", "run", "write_report"]


def run(options: argparse.Namespace) -> int:
    """Write the page and the picture, then print the table of figures and the paths of both files."""
    runs = load_runs(options.run_dir, options.baseline)
    written = write_report(runs, options.output or options.run_dir)
    print_table(runs)
    print(*(printable(str(file)) for file in written), sep="\n")
    return 0


def write_report(runs: list[Run], output: Path) -> list[Path]:
    """Write `report.html` and `report.png` for `runs` into the directory `output`.

    The page needs no other file and no network. Without matplotlib there is no picture, and a note on stderr says so.

    Args:
        runs: The result of `load_runs`.
        output: Directory to write into. It is created if necessary.

    Returns:
        The paths of the files that were written.
    """
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "report.html"]
    written[0].write_text(page(runs), encoding="utf-8", errors="replace")
    if can_plot():
        written.append(output / "report.png")
        draw_picture(runs, written[1])
    else:
        print(f"no report.png: it needs matplotlib; write: {INSTALL}", file=sys.stderr)
    return written


def print_table(runs: list[Run]) -> None:
    """Print the figures to the terminal."""
    tables.print_table("final figures", table_head(runs), table_rows(runs), ("",))
