"""One message from every rank to every other one, each of a size that both ends know."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Flight", "exchange", "start_exchange"]

Flight = Callable[[], None]
"""Waits until messages under way have arrived (on GPU: makes the current stream wait)."""


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """`start_exchange`, and wait for it."""
    start_exchange(group, outgoing, incoming, 0)()


def start_exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> Flight:
    """Begin to send: `incoming[r]` of this rank receives `outgoing[rank]` of rank r; its own entries are left alone.

    Both are lists of contiguous uint8 tensors, one a rank of `group`, empty where nothing travels. They must stay as
    they are until the returned function has been called. Several exchanges may be under way, of different `tag`s.
    """
    if group.size() == 1:
        return lambda: None
    return _BY_DEVICE[incoming[0].device.type](group, outgoing, incoming, tag)


def _point_to_point(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> Flight:
    """Rounds with one partner each, every receive posted before the first send.

    gloo answers sends that come first with half-duplex traffic; this order keeps the link full both ways.
    """
    rank, size = group.rank(), group.size()
    partners = [((rank - step) % size, (rank + step) % size) for step in range(1, size)]
    receives = [group.recv([incoming[source]], source, tag) for source, _ in partners if incoming[source].numel()]
    sends = [group.send([outgoing[target]], target, tag) for _, target in partners if outgoing[target].numel()]

    def wait() -> None:
        for work in [*receives, *sends]:
            work.wait()

    return wait


def _all_to_all(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> Flight:
    """The backend's own grouped all-to-all (NCCL: no size limit, no staging), matched by its order."""
    rank = group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    work = group.alltoall(outputs, inputs)

    def wait() -> None:
        work.wait()

    return wait


_BY_DEVICE: Mapping[str, Callable[[ProcessGroup, Sequence[Tensor], Sequence[Tensor], int], Flight]] = MappingProxyType(
    {"cpu": _point_to_point, "cuda": _all_to_all}
)
