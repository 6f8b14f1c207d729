"""State of a job, which the supervisor alone changes: its options, the connected agents, and the starts that failed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed_compress.launcher.heartbeat import EXIT_PERMANENT
from deepspeed_compress.launcher.placement import Host, Placement

EARLY_FAILURES = 3
"""Number of consecutive failures in one slot, each before the first step, after which that slot is dropped."""
EQUAL_FAILURES = 3
"""Number of consecutive equal failures without a new step, after which there is no further restart."""


@dataclass(frozen=True)
class JobOptions:
    """Parameters of a job.

    Attributes:
        id: identifier of the job. Agents of other jobs are refused.
        hosts: number of hosts.
        ranks: number of ranks on each host.
        restarts: largest number of restarts.
        hang: seconds without a heartbeat from any rank, after which all ranks are restarted.
        wait: seconds to wait for hosts.
    """

    id: str
    hosts: int
    ranks: int
    restarts: int
    hang: float
    wait: float


@dataclass
class ConnectedAgent:
    """Agent of a host, as the supervisor sees it.

    `silent` is the seconds since the last heartbeat of its ranks; None until each of them has sent one.
    """

    address: str
    slots: tuple[int, ...]
    port: int
    heard: float
    silent: float | None = None
    done: bool = False
    stopped: bool = False


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


@dataclass
class JobState:
    """State of a job.

    Attributes:
        phase: "waiting" for hosts, "running", "stopping", or "over".
        start: number of the current start.
        restarts: number of restarts so far.
        placement: hosts and slots of the ranks.
        since: time at which the job began to wait for hosts.
        signal: signal that asked the job to end; 0 for none.
        steps: largest number of steps of any start, counted by the ranks.
        step_seen: True if this start has made a step.
        code: exit code of the job, once it is over.
        why: reason for its end, once it is over.
        failures: failures of all starts.
    """

    phase: str = "waiting"
    start: int = 0
    restarts: int = 0
    placement: Placement | None = None
    since: float | None = None
    signal: int = 0
    steps: int = 0
    step_seen: bool = False
    code: int = 0
    why: str = ""
    failures: list[Failure] = field(default_factory=list)


def failing_slot(failures: Sequence[Failure]) -> tuple[str, int] | None:
    """Return the slot in which the last starts have all failed before their first step; None if there is none."""
    last = failures[-EARLY_FAILURES:]
    same = len(last) == EARLY_FAILURES and all(failure.early and failure.slot == last[0].slot for failure in last)
    return last[0].slot if same else None


def is_permanent(failures: Sequence[Failure]) -> bool:
    """Return True if no restart can help.

    Either a rank reports this by its exit code, or the last starts have ended with the same exit code, at the same step
    and on the same hosts. Ranks are not compared, because any rank may be the first to report an error of all ranks.
    """
    if failures and failures[-1].code == EXIT_PERMANENT:
        return True
    last = [(failure.code, failure.steps, failure.hosts) for failure in failures[-EQUAL_FAILURES:]]
    return len(last) == EQUAL_FAILURES and last[0][0] is not None and all(one == last[0] for one in last)
