"""Exchange of one message between every pair of ranks. Both ends know the size of each message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Waiting(Protocol):
    """Interface of a handle that can be waited for, such as a torch `Work`."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class _Collective:
    """A message between this rank and another one, held in `buffers`, that a GPU collective transfers."""

    work: Work
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        self.work.wait()
        _keep(self.buffers)


@dataclass(frozen=True)
class _FromHost:
    """A message that is received in host memory (`host`) and copied to `target` on a GPU."""

    work: Waiting
    host: Tensor
    target: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.host)
        if self.target.is_cuda:
            _keep((self.target,))


def _keep(buffers: Sequence[Tensor]) -> None:
    """Record the current stream as a user of `buffers`.

    The waiting rank reads the messages and frees all buffers, possibly on another stream than the one that allocated
    them. The allocator must not reuse their memory before this stream is done with it. On the allocating stream, this
    has no effect.
    """
    for buffer in buffers:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))


@dataclass(frozen=True)
class PendingExchange:
    """Handle of messages in progress. On a GPU, waiting means that the current stream waits."""

    receives: dict[int, Waiting] = field(default_factory=dict)
    """Handles of the messages to receive, by source rank."""
    sends: Sequence[Waiting] = ()

    def wait_for(self, source: int) -> None:
        """Wait for the message of rank `source`. Return at once if it is empty or was waited for before."""
        work = self.receives.pop(source, None)
        if work is not None:
            work.wait()

    def finish(self) -> None:
        """Wait until all messages have arrived and the buffers that were sent may change."""
        for source in list(self.receives):
            self.wait_for(source)
        for work in self.sends:
            work.wait()


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

    def all_gather(self, messages: Sequence[Tensor], tag: int) -> PendingExchange:
        """Start to send `messages[rank]` of this rank to all others: `messages[r]` receives that of rank r.

        See `start`. NCCL's all-gather brings each message to a node once, however many ranks of the group it has.
        """
        mine = messages[self.group.rank()]
        all_gather = _choose_transport(self.group, mine.device).all_gather
        if all_gather is None or self.group.size() == 1:
            return self.start([mine] * len(messages), messages, tag)
        return all_gather(self, messages)


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
    receives: dict[int, Waiting] = {
        one: groups[one < rank].recv([incoming[one]], one, tag) for one in sources if incoming[one].numel()
    }
    sends = [groups[rank < one].send([outgoing[one]], one, tag) for one in reversed(sources) if outgoing[one].numel()]
    return PendingExchange(receives, sends)


def _all_to_all(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Use the backend's grouped all-to-all (NCCL: no size limit, no staging), which is matched by call order."""
    group, rank = link.group, link.group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    work = group.alltoall(outputs, inputs)
    return PendingExchange({peer: _Collective(work, (incoming[peer], outgoing[peer])) for peer in range(group.size())})


def _all_gather(link: Link, messages: Sequence[Tensor]) -> PendingExchange:
    """Use the backend's all-gather, which is matched by call order.

    NCCL's is a group of broadcasts if sizes differ, and otherwise gathers into a buffer that is copied once more.
    """
    mine = messages[link.group.rank()]
    # The backend also writes this rank's own message.
    own = torch.empty_like(mine)
    outputs = [own if tensor is mine else tensor for tensor in messages]
    work = link.group.allgather([outputs], [mine])
    return PendingExchange({peer: _Collective(work, (output, mine)) for peer, output in enumerate(outputs)})


def _staged(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> PendingExchange:
    """Exchange through host memory, since gloo does not read GPU memory. Both copies wait for the current stream."""
    sent, received = [tensor.cpu() for tensor in outgoing], [torch.empty_like(one, device="cpu") for one in incoming]
    pending = _point_to_point(link, sent, received, tag)
    arrivals: dict[int, Waiting] = {
        one: _FromHost(work, received[one], incoming[one]) for one, work in pending.receives.items()
    }
    return PendingExchange(arrivals, pending.sends)


@dataclass(frozen=True)
class _Transport:
    """Collectives that carry messages in the memory of one type of device.

    Attributes:
        start: starts an exchange of one message between every pair of ranks.
        all_gather: starts to send one message to all ranks; None to use `start`.
    """

    start: Callable[[Link, Sequence[Tensor], Sequence[Tensor], int], PendingExchange]
    all_gather: Callable[[Link, Sequence[Tensor]], PendingExchange] | None = None


_BY_DEVICE: Mapping[str, _Transport] = {
    "cpu": _Transport(_point_to_point),
    "cuda": _Transport(_all_to_all, _all_gather),
}


def _choose_transport(group: ProcessGroup, device: torch.device) -> _Transport:
    gloo_on_gpu = device.type == "cuda" and group.name() == "gloo"
    return _Transport(_staged) if gloo_on_gpu else _BY_DEVICE[device.type]
