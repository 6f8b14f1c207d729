"""State of a job: its options, the agents, the starts that failed, and the placement of ranks on hosts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR

EARLY_FAILURES = 3
"""Number of consecutive failures on one host, each before the first step, after which that host is dropped."""
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def place(hosts: Sequence[str], nodes: int, fits: Callable[[int], bool], former: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the largest placement on at most `nodes` of `hosts`: their names by node rank; empty if there is none.

    Hosts of the `former` placement are preferred and keep their node ranks. New hosts take the places of lost ones.

    Args:
        hosts: names of the connected hosts.
        nodes: largest number of hosts.
        fits: returns True if this number of hosts, fewer than `nodes`, may train.
        former: the previous placement.
    """
    ordered = sorted(hosts, key=lambda name: name not in former)
    for count in range(min(nodes, len(hosts)), 0, -1):
        if count == nodes or fits(count):
            return _in_former_order(ordered[:count], former)
    return ()


def _in_former_order(chosen: Sequence[str], former: Sequence[str]) -> tuple[str, ...]:
    """Order `chosen` by former node ranks. New hosts fill the gaps if the number of hosts is the same, or come last."""
    if len(former) != len(chosen):
        return tuple(sorted(chosen, key=lambda name: former.index(name) if name in former else len(former)))
    new = iter([name for name in chosen if name not in former])
    return tuple(name if name in chosen else next(new) for name in former)


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

    `silent` is the seconds since the last heartbeat of its ranks; None until each of them has sent one. `dropped` is
    True if its ranks have failed so often that it is not used any more.
    """

    address: str
    port: int
    heard: float
    silent: float | None = None
    done: bool = False
    stopped: bool = False
    dropped: bool = False


@dataclass
class Failure:
    """Failure of a start.

    Attributes:
        why: reason.
        host: host of the rank that failed; None if a whole host was lost.
        permanent: True if a rank has reported that no restart can help.
        early: True if the start failed before any rank made a step.
        first_error: time and description of the first error of a rank; None if no rank has reported one.
    """

    why: str
    host: str | None = None
    permanent: bool = False
    early: bool = False
    first_error: tuple[float, str] | None = None


@dataclass
class JobState:
    """State of a job.

    Attributes:
        phase: "waiting" for hosts, "running", "stopping", or "over".
        start: number of the current start.
        restarts: number of restarts so far.
        placement: names of the hosts of this start, by node rank.
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
    placement: tuple[str, ...] = ()
    since: float | None = None
    signal: int = 0
    steps: int = 0
    step_seen: bool = False
    code: int = 0
    why: str = ""
    failures: list[Failure] = field(default_factory=list)
