"""What tests marked `gpu` found: objects of the JSON file and rows of the table."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

Verdict = Literal["pass", "fail", "missed", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Possible verdicts.

`fail` means that something is wrong. `missed` means that it works but misses its goal. `not run` means that nothing was
learned, for the reason in `why`.
"""
_STYLES: Mapping[str, str] = {"pass": "green", "fail": "bold red", "missed": "yellow", "not run": "dim"}
_WIDTH = 150
_MANY = 12
"""Number of equal findings from which the table merges them into one row."""


@dataclass(frozen=True)
class Finding:
    """Result of one test.

    Attributes:
        what: What was tested.
        verdict: Verdict of the test.
        figure: What was observed.
        goal: What it is compared with.
        why: Reason for the verdict.
        part: Part of the check.
    """

    what: str
    verdict: Verdict
    figure: str = ""
    goal: str = ""
    why: str = ""
    part: str = ""


def append_finding(path: Path, finding: Finding) -> None:
    """Add a line to `path`, so that it is there even if the process crashes later."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(finding)) + "\n")


def read_findings(path: Path) -> Iterator[Finding]:
    """Yield the findings that were added so far. A truncated line is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n"):
            yield Finding(**json.loads(line))


def document(findings: Iterable[Finding], environment: dict[str, Any], code: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the JSON file: environment, hash of each part's code, number of each verdict, findings."""
    rows = [asdict(finding) for finding in findings]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return {"environment": environment, "code": dict(code), "verdicts": counts, "findings": rows}


def print_table(heading: str, findings: Sequence[Finding]) -> None:
    """Print all `findings`, one section per part."""
    from rich.box import SIMPLE_HEAD  # may be among the wheels
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("part", "what", "figure", "goal", "verdict"):
        table.add_column(name, overflow="fold")
    rows = list(_gathered(findings))
    ends = [before.part != after.part for before, after in pairwise(rows)] + [True]
    for row, end in zip(rows, ends, strict=True):
        verdict = Text(f"{row.verdict}{f': {row.why}' if row.why else ''}", _STYLES[row.verdict])
        table.add_row(Text(row.part), Text(row.what), Text(row.figure), Text(row.goal), verdict, end_section=end)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _gathered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, with runs of many equal ones merged into one. The JSON file has them all."""
    for (verdict, _, why, _), group in groupby(
        findings, key=lambda finding: (finding.verdict, finding.goal, finding.why, finding.part)
    ):
        several = list(group)
        if len(several) < _MANY or verdict not in ("pass", "not run"):
            yield from several
        else:
            first, last = several[0], several[-1]
            what = f"{len(several)} from {first.what} to {last.what}"
            figure = first.figure if first.figure == last.figure else ""
            yield Finding(what, verdict, figure, first.goal, why, first.part)
