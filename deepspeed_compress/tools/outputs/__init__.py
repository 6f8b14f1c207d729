"""Output of diagnostics, for people at a terminal and for programs.

report    contents of the report on one run of a tool, texts of its rules; full, concise and statistics for terminals
machine   json, in the form of each tool; github; sarif
"""

from collections.abc import Callable, Mapping

from deepspeed_compress.tools.outputs.machine import github, json_array, sarif
from deepspeed_compress.tools.outputs.report import Report, concise, full, lines, plural, statistics, visible

__all__ = ["Report", "lines", "plural", "render", "visible"]

_FORMATS: Mapping[str, Callable[[Report], str]] = {
    "full": full,
    "concise": concise,
    "statistics": statistics,
    "json": json_array,
    "github": github,
    "sarif": sarif,
}


def render(report: Report, name: str) -> str:
    """Return `report` in the format `name`."""
    return _FORMATS[name](report)
