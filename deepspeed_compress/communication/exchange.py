"""One message from every rank to every other one, each of a size that both ends know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

__all__ = ["Link", "PendingExchange", "exchange"]


class Waiting(Protocol):
    """What can be waited for: a `Work` of torch, for one."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class _Collective:
    """A message between this rank and another one, in `buffers`, by a collective of a GPU."""

    work: Work
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        self.work.wait()
        _keep(self.buffers)


@dataclass(frozen=True)
class _FromHost:
    """A message that arrives at `host`, and belongs at `target`, on a GPU."""

    work: Waiting
    host: Tensor
    target: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.host)
        if self.target.is_cuda:
            _keep((self.target,))


def _keep(buffers: Sequence[Tensor]) -> None:
    """Who waits reads what has come, and frees all buffers, perhaps on another stream than the one that they were made
    on. Their memory must not be given away there before this stream is done with them; on their own it changes nothing.
    """
    for buffer in buffers:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))


@dataclass(frozen=True)
class PendingExchange:
    """Messages under way. To wait means on GPU that the current stream waits."""

    receives: dict[int, Waiting] = field(default_factory=dict)
    """By the rank that sends."""
    sends: Sequence[Waiting] = ()

    def wait_for(self, source: int) -> None:
        """Until the message of rank `source` is here; at once where nothing travels, or was waited for before."""
        work = self.receives.pop(source, None)
        if work is not None:
            work.wait()

    def finish(self) -> None:
        """Until all have arrived, and what was sent may be changed."""
        for source in list(self.receives):
            self.wait_for(source)
        for work in self.sends:
            work.wait()


@dataclass(frozen=True)
class Link:
    """The connections between the ranks of `group`.

    `downward`: a second group of the same ranks, for messages to lower ones where the backend goes point to point; None
    takes `group`. `sender`: a number that tells this rank from all others of the run, where its rank in `group` does
    not; None takes that.
    """

    group: ProcessGroup
    downward: ProcessGroup | None = None
    sender: int | None = None

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
        """Begin to send: `incoming[r]` of this rank receives `outgoing[rank]` of rank r.

        Both are lists of contiguous uint8 tensors, one a rank of `group`, empty where nothing travels; this rank's own
        are left alone. They must stay as they are until the exchange is finished. Several may be under way, of
        different `tag`s.
        """
        if self.group.size() == 1:
            return PendingExchange()
        return _way(self.group, incoming[0].device)(self, outgoing, incoming, tag)


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """`Link.start`, and wait for it."""
    Link(group).start(outgoing, incoming, 0).finish()


def _point_to_point(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Rounds with one partner each, every receive posted before the first send.

    gloo answers sends that come first with half-duplex traffic; this order keeps the link full both ways. Before a
    message travels its receiver says that it is ready, on the same connection and behind all that it sends there
    itself: with a connection for each direction that is nothing.
    """
    group = link.group
    rank, size = group.rank(), group.size()
    sources = [(rank - step) % size for step in range(1, size)]
    lanes = (link.downward or group, group)
    receives: dict[int, Waiting] = {
        one: lanes[one < rank].recv([incoming[one]], one, tag) for one in sources if incoming[one].numel()
    }
    sends = [lanes[rank < one].send([outgoing[one]], one, tag) for one in reversed(sources) if outgoing[one].numel()]
    return PendingExchange(receives, sends)


def _all_to_all(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """The backend's own grouped all-to-all (NCCL: no size limit, no staging), matched by its order."""
    group, rank = link.group, link.group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    work = group.alltoall(outputs, inputs)
    return PendingExchange({peer: _Collective(work, (incoming[peer], outgoing[peer])) for peer in range(group.size())})


def _staged(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Point to point through host memory, for gloo reads no other: both copies wait for the current stream."""
    sent, received = [tensor.cpu() for tensor in outgoing], [torch.empty_like(one, device="cpu") for one in incoming]
    pending = _point_to_point(link, sent, received, tag)
    arrivals: dict[int, Waiting] = {
        one: _FromHost(work, received[one], incoming[one]) for one, work in pending.receives.items()
    }
    return PendingExchange(arrivals, pending.sends)


_Start = Callable[[Link, Sequence[Tensor], Sequence[Tensor], int], PendingExchange]
_BY_DEVICE: Mapping[str, _Start] = MappingProxyType({"cpu": _point_to_point, "cuda": _all_to_all})


def _way(group: ProcessGroup, device: torch.device) -> _Start:
    gloo_on_gpu = device.type == "cuda" and group.name() == "gloo"
    return _staged if gloo_on_gpu else _BY_DEVICE[device.type]
