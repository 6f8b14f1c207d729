"""Failures of ranks and of starts, and conclusions from several failures in a row."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_compress.launcher.placement import Host
from deepspeed_compress.safe_files import read_text, write_json

EARLY_FAILURES = 3
"""Number of consecutive failures in one slot, each before the first step, after which that slot is dropped."""
EXIT_PERMANENT = 78
"""Exit code of a rank whose configuration is invalid, so that no restart can help (EX_CONFIG of sysexits.h)."""
EQUAL_FAILURES = 3
"""Number of consecutive equal failures without a new step, after which there is no further restart."""


@dataclass(frozen=True, order=True)
class RankError:
    """Error that ended a rank, unless the rank had only lost another one.

    Attributes:
        time: time of the error, in seconds since the epoch.
        rank: the rank.
        file: file with the whole traceback; "" if it could not be written.
        lines: the last lines of the traceback.
    """

    time: float
    rank: int
    file: str
    lines: str

    def describe(self) -> str:
        """Return a text that names the rank, and shows the end of the traceback."""
        clock, whole = time.strftime("%H:%M:%S", time.localtime(self.time)), self.file and f" (traceback: {self.file})"
        return f"rank {self.rank} failed at {clock}{whole}:\n{self.lines}"


def record_error(directory: Path, error: RankError) -> None:
    """Tell the agent, which owns `directory`, why this rank ends."""
    with suppress(OSError):
        write_json(directory / f"error_{error.rank:05d}.json", asdict(error), private=True)


def first_error(directory: Path) -> RankError | None:
    """Return the earliest error of the ranks that an agent has started with `directory`; None without any."""
    found: list[RankError] = []
    for file in directory.glob("error_*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(RankError(**json.loads(read_text(file))))
    return min(found, default=None)


@dataclass
class Failure:
    """Failure of a start.

    Attributes:
        why: reason.
        slot: host and slot of the rank that failed; None if a whole host was lost.
        code: exit code of the rank; None if a signal or a lost host may be the cause.
        early: True if the start failed before any rank made a step.
        steps: largest number of steps of any start so far.
        hosts: connected hosts.
        first_error: time and description of the first error of a rank; None if no rank has reported one.
    """

    why: str
    slot: tuple[str, int] | None = None
    code: int | None = None
    early: bool = False
    steps: int = 0
    hosts: tuple[Host, ...] = ()
    first_error: tuple[float, str] | None = None


def failing_slot(failures: Sequence[Failure]) -> tuple[str, int] | None:
    """Return the slot in which the last starts have all failed before their first step; None if there is none."""
    last = failures[-EARLY_FAILURES:]
    same = len(last) == EARLY_FAILURES and all(one.early and one.slot == last[0].slot for one in last)
    return last[0].slot if same else None


def is_permanent(failures: Sequence[Failure]) -> bool:
    """Return True if no restart can help.

    Either a rank reports this by its exit code, or the last starts have ended with the same exit code, at the same step
    and on the same hosts. Ranks are not compared, because any rank may be the first to report an error of all ranks.
    """
    if failures and failures[-1].code == EXIT_PERMANENT:
        return True
    last = [(one.code, one.steps, one.hosts) for one in failures[-EQUAL_FAILURES:]]
    return len(last) == EQUAL_FAILURES and last[0][0] is not None and all(one == last[0] for one in last)
