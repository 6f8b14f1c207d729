"""State of a job, which the supervisor alone changes: its options, the connected agents, and the current start."""

from dataclasses import dataclass, field

from deepspeed_compress.launcher.failures import Failure
from deepspeed_compress.launcher.placement import Placement


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
class Agent:
    """Connected agent.

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
