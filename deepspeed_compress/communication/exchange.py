"""One message from every rank to every other one, each of a size that both ends know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor
from torch.distributed import ProcessGroup, Work

__all__ = ["Flight", "exchange", "start_exchange"]


@dataclass(frozen=True)
class Flight:
    """Messages under way. To wait means on GPU that the current stream waits."""

    receives: dict[int, Work] = field(default_factory=dict)
    """By the rank that sends."""
    sends: Sequence[Work] = ()

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


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """`start_exchange`, and wait for it."""
    start_exchange(group, outgoing, incoming, 0).finish()


def start_exchange(
    group: ProcessGroup,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    tag: int,
    downward: ProcessGroup | None = None,
) -> Flight:
    """Begin to send: `incoming[r]` of this rank receives `outgoing[rank]` of rank r; its own entries are left alone.

    Both are lists of contiguous uint8 tensors, one a rank of `group`, empty where nothing travels. They must stay as
    they are until the flight is finished. Several exchanges may be under way, of different `tag`s. `downward`: a second
    group of the same ranks, for messages to lower ones where the backend goes point to point; None takes `group`.
    """
    if group.size() == 1:
        return Flight()
    return _BY_DEVICE[incoming[0].device.type](group, downward or group, outgoing, incoming, tag)


def _point_to_point(
    group: ProcessGroup, downward: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int
) -> Flight:
    """Rounds with one partner each, every receive posted before the first send.

    gloo answers sends that come first with half-duplex traffic; this order keeps the link full both ways. Before a
    message travels its receiver says that it is ready, on the same connection and behind all that it sends there
    itself: with a connection for each direction that is nothing.
    """
    rank, size = group.rank(), group.size()
    sources = [(rank - step) % size for step in range(1, size)]
    lanes = (downward, group)
    receives = {one: lanes[one < rank].recv([incoming[one]], one, tag) for one in sources if incoming[one].numel()}
    sends = [lanes[rank < one].send([outgoing[one]], one, tag) for one in reversed(sources) if outgoing[one].numel()]
    return Flight(receives, sends)


def _all_to_all(
    group: ProcessGroup, downward: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int
) -> Flight:
    """The backend's own grouped all-to-all (NCCL: no size limit, no staging), matched by its order."""
    rank = group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    return Flight(dict.fromkeys(range(group.size()), group.alltoall(outputs, inputs)))


_Start = Callable[[ProcessGroup, ProcessGroup, Sequence[Tensor], Sequence[Tensor], int], Flight]
_BY_DEVICE: Mapping[str, _Start] = MappingProxyType({"cpu": _point_to_point, "cuda": _all_to_all})
