"""What a part found: a row of the table, an object of the JSON file."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["VERDICTS", "Finding", "Task", "Verdict", "document", "read_findings"]

Verdict = Literal["pass", "fail", "missed", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""`fail`: something is wrong. `missed`: it works, and misses its goal. `not run`: nothing was learnt; `why` says it."""


@dataclass(frozen=True)
class Finding:
    """`what` was looked at, the `figure` that was seen and the `goal` that it is held against, for people to read.

    `part` is filled in by who starts the part.
    """

    what: str
    verdict: Verdict
    figure: str = ""
    goal: str = ""
    why: str = ""
    part: str = ""


@dataclass(frozen=True)
class Task:
    """What the process of a part is told.

    `device`: "cuda" or "cpu". `seconds`: after so many the process is ended. `output`: where files of the part go,
    besides its findings. `small`: the fewest cases of each kind, for tools that make everything slow.
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
    """What a part has written so far, a line a finding; a line that was cut short is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n"):
            yield Finding(**json.loads(line) | {"part": part})


def document(findings: Iterable[Finding], environment: dict[str, Any]) -> dict[str, Any]:
    """The JSON file: where it ran, how many of each verdict, and the findings."""
    rows = [asdict(finding) for finding in findings]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return {"environment": environment, "verdicts": counts, "findings": rows}
