"""A mirror whose messages come back after the time that a network needs: computed links, and a measured rank.

The seconds of a collective are those of the planner (`planner/cluster.py`): a ring or a direct exchange of that many
ranks, of which some share a node and its card. Collectives queue on the card, as in NCCL, while the rank computes. On
a GPU they wait on a stream of their own.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
# torch's types lack its streams, and process groups that are implemented in C++.

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_compress.planner.cluster import Cluster, Group, Links, Message
from deepspeed_compress.planner.gpus import GPUS, Constants, find_gpu
from deepspeed_compress.tools.bench.links import UNLIMITED, bits_per_second
from deepspeed_compress.tools.bench.mirror import MIRROR, Mirror
from deepspeed_compress.tools.bench.options import MirrorOptions

GLOO = Constants(network=0.9, delay=75.0)
"""Constants of links between hosts under gloo, as `plan cluster --measure` finds them on emulated hosts."""
CALIBRATION_CYCLES = 10**8


@dataclass
class Arrival:
    """Message on its way to a rank on the host."""

    at: float

    def wait(self, timeout: Any = None) -> bool:
        """Return when the message has arrived."""
        time.sleep(max(0.0, self.at - time.monotonic()))
        return True


@dataclass
class HostWire:
    """Cards of a rank on the host, which are busy until an instant."""

    busy_until: float = 0.0

    def take(self, seconds: float) -> Arrival:
        """Send for `seconds` after what is sent already."""
        self.busy_until = max(time.monotonic(), self.busy_until) + seconds
        return Arrival(self.busy_until)


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
        self._stream = torch.cuda.Stream()
        self._cycles_per_second = CALIBRATION_CYCLES / self._seconds(CALIBRATION_CYCLES)

    def _seconds(self, cycles: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def take(self, seconds: float) -> StreamArrival:
        """Send for `seconds` after what is sent already, and after the work that the current stream has so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
            return StreamArrival(self._stream.record_event())


class Wires:
    """Cards of this rank, which all groups of a job share, and the links of its network."""

    def __init__(self, network: MirrorOptions, ranks: int) -> None:
        on_gpu = torch.cuda.is_available()
        gpu = find_gpu(torch.cuda.get_device_name(0)) if on_gpu else GPUS["CPU"]
        if network.inside is not None:
            gpu = replace(gpu, link_rate=network.inside / 8)
        self.links = Links(Cluster(gpu, ranks, network.per_node, float("inf")), Constants() if on_gpu else GLOO)
        self.card = StreamWire() if on_gpu else HostWire()

    def set_rate(self, rate: str) -> None:
        """Let nodes send at a rate from now on."""
        bytes_per_second = float("inf") if rate == UNLIMITED else bits_per_second(rate) / 8
        self.links = replace(self.links, cluster=replace(self.links.cluster, network=bytes_per_second))

    def send(self, kind: str, size: float, group: Group) -> Arrival | StreamArrival:
        """Return the arrival of a collective of `group` with a buffer of `size` bytes."""
        message: Message = getattr(self.links, kind)(size, group)
        return self.card.take(message.seconds)


class NetworkMirror(Mirror):
    """Mirror whose messages take as long as a network needs. `members` are the ranks of the job in this group."""

    def __init__(self, rank: int, members: list[int], wires: Wires) -> None:
        super().__init__(rank, len(members))
        self.wires = wires
        per_node = wires.links.cluster.per_node
        self._group = Group(len(members), sum(member // per_node == members[rank] // per_node for member in members))

    def arrive(self, kind: str, size: float) -> Any:
        """Return the handle of a collective, whose names are those of `Links`."""
        return self.wires.send(kind, size, self._group)


def join_network_mirror(size: int, network: MirrorOptions) -> None:
    """Create the default group from this process and `size` - 1 mirror images behind a computed network."""
    wires = Wires(network, size)

    def create(options: Any, _: Any) -> NetworkMirror:
        members = list(options.global_ranks_in_group) or list(range(size))
        return NetworkMirror(options.group_rank, members, wires)

    dist.Backend.register_backend(MIRROR, create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(MIRROR, store=dist.HashStore(), rank=0, world_size=size)


def set_mirrored_rate(rate: str) -> bool:
    """Let a mirror's nodes send at a rate. Return False if the default group is none with a network."""
    group: Any = dist.distributed_c10d._get_default_group()
    if not isinstance(group, NetworkMirror):
        return False
    group.wires.set_rate(rate)
    return True
