"""Table of findings on the terminal."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
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
_MANY = 12
"""Number of equal findings from which the table merges them into one row."""


def print_table(heading: str, findings: Sequence[Finding]) -> None:
    """Print all `findings`, one section per part."""
    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("part", "what", "figure", "goal", "verdict"):
        table.add_column(name, overflow="fold")
    rows = list(_gathered(findings))
    ends = [before.part != after.part for before, after in pairwise(rows)] + [True]
    for one, end in zip(rows, ends, strict=True):
        verdict = Text(f"{one.verdict}{f': {one.why}' if one.why else ''}", _STYLES[one.verdict])
        table.add_row(Text(one.part), Text(one.what), Text(one.figure), Text(one.goal), verdict, end_section=end)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _gathered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, with runs of many equal ones merged into one. The JSON file has them all."""
    for (verdict, _, why, _), group in groupby(findings, key=lambda one: (one.verdict, one.goal, one.why, one.part)):
        several = list(group)
        if len(several) < _MANY or verdict not in ("pass", "not run"):
            yield from several
        else:
            first, last = several[0], several[-1]
            what = f"{len(several)} from {first.what} to {last.what}"
            yield Finding(
                what, verdict, last.figure if first.figure == last.figure else "", first.goal, why, first.part
            )
