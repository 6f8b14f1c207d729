"""Exchange of one message between every pair of ranks. Both ends know the size of each message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Waiting(Protocol):
    """Interface of a handle that can be waited for, such as a torch `Work`."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class _Collective:
    """Messages between this rank and all others, held in `buffers`, that one GPU collective transfers."""

    work: Work
    buffers: Sequence[Tensor]

    def wait(self) -> None:
        self.work.wait()
        _keep(self.buffers)


def _keep(buffers: Sequence[Tensor]) -> None:
    """Record the current stream as a user of `buffers`.

    The waiting rank reads the messages and frees all buffers, possibly on another stream than the one that allocated
    them. The allocator must not reuse their memory before this stream is done with it. On the allocating stream, this
    has no effect.
    """
    stream = torch.cuda.current_stream(buffers[0].device)
    for buffer in buffers:
        buffer.record_stream(stream)


@dataclass(frozen=True)
class PendingExchange:
    """Handle of messages in progress. On a GPU, waiting means that the current stream waits."""

    receives: list[Waiting] = field(default_factory=list)
    """Handles of the messages to receive."""
    sends: Sequence[Waiting] = ()

    def receive(self) -> None:
        """Wait until all messages have arrived. Each handle is waited for once, even if that fails."""
        while self.receives:
            self.receives.pop(0).wait()

    def finish(self) -> None:
        """Wait until all messages have arrived and the buffers that were sent may change."""
        self.receive()
        for work in self.sends:
            work.wait()


@dataclass(frozen=True)
class _FromHost:
    """Messages of `pending` in host memory, copied to `targets` on a GPU once all have arrived."""

    pending: PendingExchange
    hosts: Sequence[Tensor]
    targets: Sequence[Tensor]

    def wait(self) -> None:
        self.pending.receive()
        for host, target in zip(self.hosts, self.targets, strict=True):
            target.copy_(host)
        if self.targets and self.targets[0].is_cuda:
            _keep(self.targets)


@dataclass(frozen=True)
class Link:
    """The connections between the ranks of `group`.

    Attributes:
        group: the ranks.
        downward: second group of the same ranks, for messages to lower ranks on point-to-point backends; None to use
            `group`.
        sender: number that is unique to this rank in the run, if its rank in `group` is not; None to use that rank.
    """

    group: ProcessGroup
    downward: ProcessGroup | None = None
    sender: int | None = None

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
        """Start to send: `incoming[r]` of this rank receives `outgoing[rank]` of rank r.

        Both are lists of contiguous uint8 tensors, one per rank of `group`, empty if nothing is sent. This rank's own
        entries are ignored. The tensors must not change until the exchange is finished. Several exchanges with
        different `tag`s may be in progress.
        """
        if self.group.size() == 1:
            return PendingExchange()
        return _choose_transport(self.group, incoming[0].device).start(self, outgoing, incoming, tag)

    def start_split(
        self, outgoing: Tensor, sent: list[int], incoming: Tensor, received: list[int], tag: int
    ) -> PendingExchange:
        """Do what `start` does with the messages of all ranks in one buffer.

        `outgoing` (uint8) holds messages of `sent` bytes to the ranks of `group`, one after another, and `incoming`
        receives messages of `received` bytes from them. This rank's own have no bytes.
        """
        if self.group.size() == 1:
            return PendingExchange()
        transport = _choose_transport(self.group, incoming.device)
        if transport.start_split is not None:
            return transport.pending(*transport.start_split(self, outgoing, sent, incoming, received))
        return transport.start(self, torch.split(outgoing, sent), torch.split(incoming, received), tag)

    def all_gather_split(self, messages: Tensor, sizes: Sequence[int], tag: int) -> PendingExchange:
        """Start to send this rank's message to all others: `messages` receives theirs, of `sizes` bytes in rank order.

        See `start`. NCCL's all-gather brings each message to a node once, however many ranks of the group it has.
        """
        parts = torch.split(messages, list(sizes))
        transport = _choose_transport(self.group, messages.device)
        if transport.all_gather_split is None or self.group.size() == 1:
            return self.start([parts[self.group.rank()]] * len(parts), parts, tag)
        return transport.pending(*transport.all_gather_split(self, messages, parts))


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Run `Link.start` and wait for it."""
    Link(group).start(outgoing, incoming, 0).finish()


def _point_to_point(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Exchange with one partner after the other, with every receive posted before the first send.

    If sends come first, gloo falls back to half-duplex traffic; this order keeps the link busy in both directions. The
    receiver announces that it is ready before a message is sent, on the same connection and behind everything that it
    sends there itself. With one connection per direction, that announcement has nothing to wait for.
    """
    group = link.group
    rank, size = group.rank(), group.size()
    sources = [(rank - step) % size for step in range(1, size)]
    groups = (link.downward or group, group)
    receives: list[Waiting] = [
        groups[source < rank].recv([incoming[source]], source, tag) for source in sources if incoming[source].numel()
    ]
    sends = [
        groups[rank < source].send([outgoing[source]], source, tag)
        for source in reversed(sources)
        if outgoing[source].numel()
    ]
    return PendingExchange(receives, sends)


def _all_to_all(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Use the backend's grouped all-to-all (NCCL: no size limit, no staging), which is matched by call order."""
    group, rank = link.group, link.group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    work = group.alltoall(outputs, inputs)
    return PendingExchange([_Collective(work, [*incoming, *outgoing])])


_Started = tuple[Work, list[Tensor]]
"""The handle of a collective, and the buffers that it reads and writes."""


def _all_to_all_split(link: Link, outgoing: Tensor, sent: list[int], incoming: Tensor, received: list[int]) -> _Started:
    """Use the backend's all-to-all of parts of a buffer."""
    return link.group.alltoall_base(incoming, outgoing, received, sent), [incoming, outgoing]


def _all_gather_split(link: Link, messages: Tensor, parts: Sequence[Tensor]) -> _Started:
    """Use the backend's all-gather into the `parts` of a buffer."""
    group, mine = link.group, parts[link.group.rank()]
    if len({part.shape for part in parts}) == 1:
        return group._allgather_base(messages, mine), [messages]
    # The backend also writes this rank's own message.
    own = torch.empty_like(mine)
    return group.allgather([[own if part is mine else part for part in parts]], [mine]), [messages, own]


def _all_gather_by_exchange(link: Link, messages: Tensor, parts: Sequence[Tensor]) -> _Started:
    return link.group.alltoall(list(parts), [parts[link.group.rank()]] * len(parts)), [messages]


def _staged(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Exchange through host memory, since gloo does not read GPU memory. Both copies wait for the current stream."""
    sent, received = [tensor.cpu() for tensor in outgoing], [torch.empty_like(one, device="cpu") for one in incoming]
    pending = _point_to_point(link, sent, received, tag)
    others = [peer for peer in range(len(incoming)) if peer != link.group.rank()]
    arrival = _FromHost(pending, [received[peer] for peer in others], [incoming[peer] for peer in others])
    return PendingExchange([arrival], pending.sends)


@dataclass(frozen=True)
class _Transport:
    """Collectives that carry messages in the memory of one type of device.

    Attributes:
        start: starts an exchange of one message between every pair of ranks.
        start_split: starts an exchange of messages in one buffer; None to use `start`.
        all_gather_split: starts to send one message of a buffer to all ranks; None to use `start`.
        has_streams: collectives run on streams of their own, as those of a GPU.
    """

    start: Callable[[Link, Sequence[Tensor], Sequence[Tensor], int], PendingExchange]
    start_split: Callable[[Link, Tensor, list[int], Tensor, list[int]], _Started] | None = None
    all_gather_split: Callable[[Link, Tensor, Sequence[Tensor]], _Started] | None = None
    has_streams: bool = True

    def pending(self, work: Work, buffers: list[Tensor]) -> PendingExchange:
        """Return the handle of a collective that has started."""
        return PendingExchange([_Collective(work, buffers) if self.has_streams else work])


_BY_DEVICE: Mapping[str, _Transport] = {
    "cpu": _Transport(_point_to_point, has_streams=False),
    "cuda": _Transport(_all_to_all, _all_to_all_split, _all_gather_split),
}
_BY_MIRROR: Mapping[str, _Transport] = {
    "mirror": _Transport(_point_to_point, _all_to_all_split, _all_gather_split, has_streams=False),
    "mirror of gloo": _Transport(_point_to_point, _all_to_all_split, _all_gather_by_exchange, has_streams=False),
}
"""Transports of mirrors on the host, by name: they have no connections, whose number would limit that of ranks.

Between hosts under gloo, every rank sends what is gathered to each of the others.
"""


def _choose_transport(group: ProcessGroup, device: torch.device) -> _Transport:
    if device.type == "cuda" and group.name() == "gloo":
        return _Transport(_staged)
    if device.type == "cpu" and group.name() in _BY_MIRROR:
        return _BY_MIRROR[group.name()]
    return _BY_DEVICE[device.type]


def is_gloo(group: ProcessGroup | None = None) -> bool:
    """Return True if `group`, or that of all ranks, uses gloo on every device.

    `torch.distributed.get_backend` does not tell: if the program names no backend, or one for each device, it returns
    "undefined", or a string such as "cpu:gloo".
    """
    pairs = dist.get_backend_config(group).split(",")
    return all(pair.endswith(":gloo") for pair in pairs)
