"""Shared plotting helpers: the check for matplotlib, and a common style of figures and axes."""

import importlib.util
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import UnsupportedError, install_command

COLOURS = ("#0b5394", "#e69138", "#38761d", "#a61c00", "#674ea7", "#76a5af", "#b45f06")
GREY, GRID = "#8c959f", "#eaeef2"


def check_plotting(option: str, file: Path | None = None) -> None:
    """Check that `option` can draw a picture, into `file` if one is given.

    Raises:
        UnsupportedError: matplotlib is missing, or does not support the type of `file`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(f"{option} needs matplotlib; write: {install_command('plot')}")
    from matplotlib.backend_bases import FigureCanvasBase

    if file is not None and file.suffix.removeprefix(".").lower() not in FigureCanvasBase.filetypes:
        kinds = ", ".join(sorted(f".{kind}" for kind in FigureCanvasBase.filetypes))
        raise UnsupportedError(f"{option} {file}: is no picture (allowed: {kinds}); write {file.with_suffix('.png')}")


def new_figure(width: float, height: float) -> Any:
    """Return a figure of this size in inches on white paper. Axes and labels are kept from overlapping."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: Any, file: Path) -> Path:
    """Write `figure` to `file`, whose directory is created if necessary. Return `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    return file


def style_axes(axes: Any, title: str = "", grid: str | None = GRID) -> None:
    """Style axes: title on the left, small ticks, pale grid (None for no grid), no frame.

    A legend is added if anything has a label.
    """
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(color=grid, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
