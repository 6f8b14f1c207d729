"""State of a job: its options, the agents, the starts that failed, and the placement of ranks on slots of hosts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR
from deepspeed_compress.launcher.heartbeat import EXIT_PERMANENT

EARLY_FAILURES = 3
"""Number of consecutive failures in one slot, each before the first step, after which that slot is dropped."""
EQUAL_FAILURES = 3
"""Number of consecutive equal failures without a new step, after which there is no further restart."""
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Host:
    """Connected host. `slots` are the numbers of its usable slots for ranks, such as GPUs."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Hosts by node rank, each with the slots of its ranks."""

    hosts: tuple[Host, ...]

    @property
    def world(self) -> int:
        """Return the total number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Return the first rank of the host `node`."""
        return sum(len(host.slots) for host in self.hosts[:node])


def place(
    hosts: Sequence[Host], nodes: int, ranks: int, fits: Callable[[int], bool], former: Placement | None = None
) -> Placement | None:
    """Return the largest placement on at most `nodes` of `hosts`, with the same number of ranks on each.

    Hosts of the `former` placement are preferred and keep their node ranks. New hosts take the places of lost ones.

    Args:
        hosts: the connected hosts.
        nodes: largest number of hosts.
        ranks: largest number of ranks on each host.
        fits: returns True if this total number of ranks may train. `nodes` x `ranks` always may.
        former: the previous placement.

    Returns:
        The placement; None if there is none.
    """
    before = [host.name for host in former.hosts] if former is not None else []
    ordered = sorted(hosts, key=lambda host: host.name not in before)
    for count, each in _shapes(nodes, ranks):
        able = [Host(host.name, host.slots[:each]) for host in ordered if len(host.slots) >= each]
        if len(able) >= count and (count * each == nodes * ranks or fits(count * each)):
            return Placement(_in_former_order(able[:count], before))
    return None


def _shapes(nodes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (hosts, ranks on each), in the order of decreasing total ranks, and then of decreasing hosts."""
    shapes = [(count, each) for count in range(1, nodes + 1) for each in range(1, ranks + 1)]
    yield from sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)


def _in_former_order(chosen: Sequence[Host], before: Sequence[str]) -> tuple[Host, ...]:
    """Order `chosen` by former node ranks. New hosts fill the gaps if the number of hosts is the same, or come last."""
    if len(before) != len(chosen):
        return tuple(sorted(chosen, key=lambda host: before.index(host.name) if host.name in before else len(before)))
    known = {host.name: host for host in chosen}
    new = iter([host for host in chosen if host.name not in before])
    return tuple(known[name] if name in known else next(new) for name in before)


def size_problem(ds_config: Mapping[str, Any] | None, ranks: int) -> str:
    """Return why `ranks` ranks cannot train the batches that `ds_config` specifies; "" if they can.

    The rules are those of DeepSpeed's `runtime/config.py`. `ds_config` is None if it is unknown.
    """
    if ds_config is None:
        return f"the program's arguments contain no DeepSpeed configuration with {_BATCH}"
    batch = ds_config.get(_BATCH)
    if not isinstance(batch, int):
        return f"/{_BATCH} is {batch!r}, so another number of ranks would train other batches; write a number"
    copies, rest = divmod(ranks, _ranks_of_a_copy(ds_config))
    if rest or not copies:
        return f"{ranks} ranks are not a multiple of tensor x pipeline = {_ranks_of_a_copy(ds_config)}"
    given = {key: ds_config[key] for key in (_MICRO, _STEPS) if isinstance(ds_config.get(key), int)}
    product = copies * math.prod(given.values())
    if batch % product == 0 and (len(given) < 2 or batch == product):
        return ""
    factors = " x ".join(f"{key} {value}" for key, value in given.items()) or "1"
    advice = f"; leave out {_STEPS}" if len(given) == 2 else ""
    return f"/{_BATCH} {batch} is not divisible by {copies} replicas x {factors}{advice}"


def _ranks_of_a_copy(ds_config: Mapping[str, Any]) -> int:
    """Return the number of ranks that hold one copy of the model's layers."""
    section = parse_section(dict(ds_config)) if SECTION in ds_config else None
    parallelism = section.parallelism if section is not None else None
    return TENSOR.effective(ds_config, parallelism or Parallelism()) * (parallelism.pipeline if parallelism else 1)


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
