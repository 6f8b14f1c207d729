"""One message from every rank to every other one, each of a size that both ends know."""

from collections.abc import Callable, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["exchange"]


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """`incoming[r]` of this rank receives `outgoing[rank]` of rank r; entries of the rank itself are left alone.

    Both are lists of contiguous uint8 tensors, one a rank of `group`, empty where nothing travels. Returns when
    `incoming` is complete (on GPU: in the order of the current stream).
    """
    if group.size() > 1:
        _BY_DEVICE[incoming[0].device.type](group, outgoing, incoming)


def _point_to_point(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Rounds with one partner each, every receive posted before the first send.

    gloo answers sends that come first with half-duplex traffic; this order keeps the link full both ways.
    """
    rank, size = group.rank(), group.size()
    partners = [((rank - step) % size, (rank + step) % size) for step in range(1, size)]
    receives = [group.recv([incoming[source]], source, 0) for source, _ in partners if incoming[source].numel()]
    sends = [group.send([outgoing[target]], target, 0) for _, target in partners if outgoing[target].numel()]
    for work in [*receives, *sends]:
        work.wait()


def _all_to_all(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """The backend's own grouped all-to-all (NCCL: no size limit, no staging)."""
    rank = group.rank()
    nothing = incoming[rank].new_empty(0)
    inputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(outgoing)]
    outputs = [tensor if peer != rank else nothing for peer, tensor in enumerate(incoming)]
    group.alltoall(outputs, inputs).wait()


_BY_DEVICE: MappingProxyType[str, Callable[[ProcessGroup, Sequence[Tensor], Sequence[Tensor]], None]] = (
    MappingProxyType({"cpu": _point_to_point, "cuda": _all_to_all})
)
