"""Findings of a part: rows of the table and objects of the JSON file."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["VERDICTS", "Finding", "Task", "Verdict", "document", "read_findings"]

Verdict = Literal["pass", "fail", "missed", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Possible verdicts.

`fail` means that something is wrong. `missed` means that it works but misses its goal. `not run` means that nothing was
learned, for the reason in `why`.
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check, in words for people.

    Attributes:
        what: What was checked.
        verdict: Verdict of the check.
        figure: What was observed.
        goal: What it is compared with.
        why: Reason for the verdict.
        part: Name of the part. It is filled in by the program that starts the part.
    """

    what: str
    verdict: Verdict
    figure: str = ""
    goal: str = ""
    why: str = ""
    part: str = ""


@dataclass(frozen=True)
class Task:
    """Task of the process of a part.

    Attributes:
        device: "cuda" or "cpu".
        seconds: Time after which the process is ended.
        output: Directory for files of the part other than its findings.
        small: Whether to run the fewest cases of each kind, for tools that slow everything down.
    """

    device: str
    seconds: float
    output: Path
    small: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Task":
        found = json.loads(text)
        return cls(**found | {"output": Path(found["output"])})


def read_findings(path: Path, part: str) -> Iterator[Finding]:
    """Yield what a part has written so far, one finding per line. A truncated line is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n"):
            yield Finding(**json.loads(line) | {"part": part})


def document(findings: Iterable[Finding], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the JSON file: the environment, the number of each verdict, and the findings."""
    rows = [asdict(finding) for finding in findings]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return {"environment": environment, "verdicts": counts, "findings": rows}
