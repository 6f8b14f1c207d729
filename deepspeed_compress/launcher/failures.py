"""Reasons for the failures of starts, and conclusions from several failures in a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.launcher.placement import Host

__all__ = ["EARLY", "HOPELESS", "PERMANENT", "Failure", "hopeless", "lost_slot"]

EARLY = 3
"""Number of consecutive starts that fail in a slot before their first step, after which that slot is dropped."""
PERMANENT = 78
"""Exit code of a rank whose configuration is wrong, so that no restart can help (EX_CONFIG of sysexits.h)."""
HOPELESS = 3
"""Number of consecutive starts that fail alike without a new step, after which there is no other restart."""


@dataclass
class Failure:
    """Failure of a start.

    Attributes:
        why: reason.
        slot: host and slot of the rank that failed, if it was one rank.
        code: exit code of a rank that ended without a signal; None if a signal or a lost host may be the cause.
        early: True if it failed before any rank made a step.
        steps: largest number of steps of any start by then.
        hosts: connected hosts.
    """

    why: str
    slot: tuple[str, int] | None = None
    code: int | None = None
    early: bool = False
    steps: int = 0
    hosts: tuple[Host, ...] = ()


def lost_slot(failures: Sequence[Failure]) -> tuple[str, int] | None:
    """Return the slot in which start after start has failed before its first step; None if there is none."""
    last = failures[-EARLY:]
    alike = len(last) == EARLY and all(one.early and one.slot == last[0].slot for one in last)
    return last[0].slot if alike else None


def hopeless(failures: Sequence[Failure]) -> bool:
    """Return True if no restart can help.

    A rank reports this by its exit code; or else the last starts have ended with one exit code, at the same step and on
    the same hosts. The rank is not compared, because an error in all ranks may be seen in any of them first.
    """
    if failures and failures[-1].code == PERMANENT:
        return True
    last = [(one.code, one.steps, one.hosts) for one in failures[-HOPELESS:]]
    return len(last) == HOPELESS and last[0][0] is not None and all(one == last[0] for one in last)
