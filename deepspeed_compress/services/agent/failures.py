"""Why starts of a job have ended, and what several in a row say of the next one."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.services.agent.placement import Host

__all__ = ["EARLY", "HOPELESS", "PERMANENT", "Failure", "hopeless", "lost_slot"]

EARLY = 3
"""Starts in a row that fail at one slot before their first step, after which that slot is left out."""
PERMANENT = 78
"""Exit code of a rank that no restart can help, as its configuration is wrong (EX_CONFIG of sysexits.h)."""
HOPELESS = 3
"""Starts in a row that end alike without a new step, after which there is no other."""


@dataclass
class Failure:
    """Why a start has ended, and which slot it was, if it was one.

    `code`: exit code of a rank that has ended by itself; None where a signal or a lost host may be the cause. `early`:
    before a step of any rank. `steps`: most that any start had made by then. `hosts`: that were there.
    """

    why: str
    slot: tuple[str, int] | None = None
    code: int | None = None
    early: bool = False
    steps: int = 0
    hosts: tuple[Host, ...] = ()


def lost_slot(failures: Sequence[Failure]) -> tuple[str, int] | None:
    """The slot where start after start has failed before its first step."""
    last = failures[-EARLY:]
    alike = len(last) == EARLY and all(one.early and one.slot == last[0].slot for one in last)
    return last[0].slot if alike else None


def hopeless(failures: Sequence[Failure]) -> bool:
    """Return True if a rank says so by its exit code, or if starts have ended with one exit code, at the same step and
    on the same hosts. Of an error that all ranks run into any may be the first that is seen."""
    if failures and failures[-1].code == PERMANENT:
        return True
    last = [(one.code, one.steps, one.hosts) for one in failures[-HOPELESS:]]
    return len(last) == HOPELESS and last[0][0] is not None and all(one == last[0] for one in last)
