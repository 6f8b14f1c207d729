"""A mirror (`ds-compress bench step --mirror`) whose messages take as long as a network needs: one measured rank.

The seconds of a collective are those of the planner (`planner/cluster.py`): a ring or a direct exchange of that many
ranks, of which some share a node and its card. Collectives queue on the card, as in NCCL, while the rank computes. On
a GPU they wait on a stream of their own.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
# torch's types lack its streams, and process groups that are implemented in C++.

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.planner.cluster import Cluster, Group, Links, Message
from deepspeed_compress.planner.gpus import GPUS, Constants, find_gpu
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.jobs import Row
from deepspeed_compress.tools.bench.mirror import MIRROR, Mirror
from deepspeed_compress.tools.bench.step_rank import measure_group
from deepspeed_compress.tools.bench.workload import Group as Contenders

GLOO_DELAY = 45.0
"""Delays of gloo relative to those of NCCL: small messages in `bench comm --emulate 2,1gbit`, a core each."""
GLOO_SHARES: Mapping[str, tuple[float, float]] = {
    "reduce": (0.96, 0.96),
    "scatter": (0.96, 0.96),
    "gather": (0.65, 0.88),
    "exchange": (0.96, 0.88),
}
"""Shares of a link's rate that collectives of two ranks, and of more, reach under gloo (`bench comm --emulate`).

Two ranks gather over a single connection, on which announcements wait behind the data.
"""
CALIBRATION_CYCLES = 10**8


@dataclass(frozen=True)
class Arrival:
    """Message on its way to a rank on the host: the instant of its arrival, and gloo's work for it."""

    at: float
    works: Sequence[Any] = ()

    def wait(self, timeout: Any = None) -> bool:
        """Return when the work is done and the message has arrived."""
        for work in self.works:
            work.wait()
        time.sleep(max(0.0, self.at - time.monotonic()))
        return True


def join_gloo() -> Sequence[Any]:
    """Return the ranks of gloo in this process, which do the work of messages on the host.

    They are a pair, or one of the processes of a launcher, which are mirrors of equal ranks and meet in each message.
    They join before `join` replaces the launcher's variables.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return [_join(*next(dist.rendezvous("env://")))]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(partial(_join, dist.HashStore(), size=2), range(2)))


def _join(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, dist.default_pg_timeout)


def _own(group: Any, buffer: Tensor) -> Tensor:
    own: Tensor = buffer.chunk(group.size())[group.rank()]
    return own


def _exchange(group: Any, buffer: Tensor) -> list[Any]:
    parts = buffer.chunk(group.size())
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    return [group.recv([parts[peer]], peer, 0) for peer in peers] + [
        group.send([parts[peer]], peer, 0) for peer in peers
    ]


GLOO_CALLS: Mapping[str, Callable[[Any, Tensor], list[Any]]] = {
    "reduce": lambda group, buffer: [group.allreduce([buffer])],
    "gather": lambda group, buffer: [group._allgather_base(buffer, _own(group, buffer))],
    "scatter": lambda group, buffer: [group._reduce_scatter_base(_own(group, buffer), buffer)],
    "exchange": _exchange,
}
"""Functions that start a collective of gloo with a buffer, by the name of its cost in `planner.cluster.Links`."""


class HostWire:
    """Card of a rank on the host, which is busy until an instant, while `ranks` of gloo do the work of its messages.

    Together, they send, receive and add as many bytes as the rank does, on this machine and without a limit.
    """

    gpu = GPUS["CPU"]

    def __init__(self, ranks: Sequence[Any] = ()) -> None:
        self._busy_until, self._ranks, self._zeros = 0.0, ranks, torch.zeros(0)

    def constants(self, kind: str, ranks: int) -> Constants:
        """Return the constants of a collective of `ranks` ranks."""
        return Constants(network=GLOO_SHARES[kind][ranks > 2], delay=GLOO_DELAY)

    def take(self, seconds: float, kind: str, size: float) -> Arrival:
        """Send for `seconds` after what is sent already. `size` bytes of the collective's buffer are of other ranks."""
        self._busy_until = max(time.monotonic(), self._busy_until) + seconds
        return Arrival(self._busy_until, list(self._work(kind, size)) if size and self._ranks else ())

    def _work(self, kind: str, size: float) -> Iterator[Any]:
        """Start gloo's collectives, whose buffers have `size` bytes of other ranks in total."""
        ranks = self._ranks[0].size()
        numel = ranks * max(1, round(size / (len(self._ranks) * (ranks - 1) * self._zeros.element_size())))
        whole = numel * len(self._ranks)
        if self._zeros.numel() < whole:
            self._zeros = torch.zeros(whole)
        for group, buffer in zip(self._ranks, self._zeros[:whole].split(numel), strict=True):
            yield from GLOO_CALLS[kind](group, buffer)


@dataclass
class StreamArrival:
    """Message on its way to a GPU, whose stream waits for it."""

    event: torch.cuda.Event

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for the message."""
        torch.cuda.current_stream().wait_event(self.event)
        return True


class StreamWire:
    """Cards of a GPU: a stream on which each message occupies the time that it needs, after what it consists of."""

    def __init__(self) -> None:
        self.gpu = find_gpu(torch.cuda.get_device_name(0))
        self._stream = torch.cuda.Stream()
        self._cycles_per_second = CALIBRATION_CYCLES / self._seconds(CALIBRATION_CYCLES)

    def _seconds(self, cycles: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def constants(self, kind: str, ranks: int) -> Constants:
        """Return the constants of a collective, which are those of NCCL."""
        return Constants()

    def take(self, seconds: float, kind: str, size: float) -> StreamArrival:
        """Send for `seconds` after what is sent already, and after the work that the current stream has so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
            return StreamArrival(self._stream.record_event())


Card = HostWire | StreamWire


class Wires:
    """Card of this rank, which all groups of a job share, and the cluster that it belongs to."""

    def __init__(self, ranks: int, per_node: int, card: Card) -> None:
        self.cluster, self.card = Cluster(card.gpu, ranks, per_node, float("inf")), card

    def set_rate(self, rate: float) -> None:
        """Let nodes send at a rate, in bits per second, from now on."""
        self.cluster = replace(self.cluster, network=rate / 8)

    def message(self, kind: str, size: float, group: Group) -> Message:
        """Return the cost of a collective of `group` with a buffer of `size` bytes. Kinds are the names of `Links`."""
        found: Message = getattr(Links(self.cluster, self.card.constants(kind, group.ranks)), kind)(size, group)
        return found

    def send(self, kind: str, size: float, group: Group) -> Arrival | StreamArrival:
        """Return the arrival of a collective, as in `message`."""
        seconds = self.message(kind, size, group).seconds
        return self.card.take(seconds, kind, size * (group.ranks - 1) / group.ranks)


class NetworkMirror(Mirror):
    """Mirror whose messages take as long as a network needs. `members` are the ranks of the job in this group."""

    def __init__(self, rank: int, members: list[int], wires: Wires) -> None:
        super().__init__(rank, len(members))
        self.wires = wires
        per_node = wires.cluster.per_node
        self._name = MIRROR if wires.cluster.gpu.backend == "nccl" else f"{MIRROR} of {wires.cluster.gpu.backend}"
        self._group = Group(len(members), sum(member // per_node == members[rank] // per_node for member in members))

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self._name

    def arrive(self, kind: str, size: float) -> Any:
        """Return the handle of a collective, whose names are those of `Links`."""
        return self.wires.send(kind, size, self._group)


def join(wires: Wires) -> None:
    """Create the default group from this process, as rank 0, and mirror images behind a computed network."""

    def create(options: Any, _: Any) -> NetworkMirror:
        members = list(options.global_ranks_in_group) or list(range(wires.cluster.gpus))
        return NetworkMirror(options.group_rank, members, wires)

    dist.Backend.register_backend(MIRROR, create, extended_api=True, devices=["cpu", "cuda"])
    gauges.join_images(wires.cluster.gpus, wires.cluster.per_node)


def measure(wires: Wires, contenders: Contenders, steps: Mapping[float, int]) -> Iterator[tuple[float, Row]]:
    """Yield a row of each contender at each rate, in bits per second, with so many measured steps."""
    for rate, count in steps.items():
        rows: list[Row] = []
        wires.set_rate(rate)
        measure_group(contenders, {None: count}, rows.append, print, bare=False)
        yield from ((rate, row) for row in rows)
