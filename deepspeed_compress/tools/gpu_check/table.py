"""The table on the terminal."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_compress.tools.gpu_check.findings import Finding

__all__ = ["print_table"]

_STYLES: Mapping[str, str] = MappingProxyType(
    {"pass": "green", "fail": "bold red", "missed": "yellow", "not run": "dim"}
)
_WIDTH = 150


def print_table(heading: str, findings: Sequence[Finding]) -> None:
    """All `findings`, a section a part."""
    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("part", "what", "figure", "goal", "verdict"):
        table.add_column(name, overflow="fold")
    ends = [before.part != after.part for before, after in pairwise(findings)] + [True]
    for one, end in zip(findings, ends, strict=True):
        verdict = Text(f"{one.verdict}{f': {one.why}' if one.why else ''}", _STYLES[one.verdict])
        table.add_row(Text(one.part), Text(one.what), Text(one.figure), Text(one.goal), verdict, end_section=end)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
