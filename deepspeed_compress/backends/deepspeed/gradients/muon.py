"""Whole mean gradients for the Muon optimizer under ZeRO 1 and 2, and byte counts of what DeepSpeed gathers for Muon.

Muon orthogonalizes whole matrices (`DeepSpeedZeroOptimizer.get_flat_partition`), on every rank that owns a part of
one. After our reduction, a rank has the mean of the slices that it owns. That is enough for a matrix with one owner. A
matrix that lies across a border between two partitions has several owners; a parameter group has at most ranks - 1
borders. These owners send each other their slices of the mean, uncompressed. They hold the same bits afterwards, so
their copies of the momentum stay equal.

Under ZeRO 3, and under ZeRO 1 and 2 with optimizer offload, DeepSpeed's `step` itself gathers the means and the
momentum of whole matrices, and their updates. That needs no help, but it must be counted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.comm import comm
from torch import Tensor

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition
from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.monitor import Meter, ring_all_gather
from deepspeed_compress.session.patches import replaced
from deepspeed_compress.session.session import Session

SliceOf = Callable[[Segment], Tensor]
"""Function that returns the elements of a segment, as a flat view of the gradient that DeepSpeed reads."""


_Routes = tuple[list[list[Segment]], list[list[Segment]]]
"""Segments that this rank sends to each rank, and receives from each; empty for this rank itself."""


class SplitMatrices:
    """Exchange of the mean gradients of Muon's matrices between the ranks that own parts of them.

    Args:
        optimizer: a DeepSpeedZeroOptimizer. Without Muon, no matrix is exchanged.
        session: the engine's session, which counts the bytes.
    """

    def __init__(self, optimizer: Any, session: Session) -> None:
        self._session = session
        self._group = optimizer.dp_process_group
        self._device = optimizer.bit16_groups_flat[0].device
        self._matrices = frozenset(_matrices(optimizer))
        self._routes = lru_cache(maxsize=LAYOUTS)(self._find_routes)

    def complete(self, partition: Partition, slice_of: SliceOf) -> None:
        """Write the means of other owners into the split matrices of a reduced bucket that this rank has a part of.

        All ranks call it for the same buckets in the same order. If a bucket has no split matrix, nothing is sent.

        Args:
            partition: the owners of the bucket's segments.
            slice_of: returns the elements of a segment of a parameter that this rank owns a part of.
        """
        routes = self._routes(partition)
        if routes is None:
            return
        meter, pace = self._session.meter, self._session.run.pace
        sent, received = routes
        outgoing = [self._message([slice_of(part) for part in parts]) for parts in sent]
        places = [[slice_of(part) for part in parts] for parts in received]
        incoming = [self._empty(sum(place.nbytes for place in some)) for some in places]
        size = sum(message.nbytes for message in outgoing)
        meter.count("bytes_sent", size)
        meter.count("bytes_raw", size)
        if pace is not None:
            pace.wait(size)
        with meter.phase("communicate", self._device):
            exchange(self._group, outgoing, incoming)
        for some, message in zip(places, incoming, strict=True):
            for place, part in zip(some, torch.split(message, [place.nbytes for place in some]), strict=True):
                place.copy_(part.view(place.dtype))

    def _message(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the bytes of `slices`, in order."""
        return torch.cat([one.contiguous().view(torch.uint8) for one in slices]) if slices else self._empty(0)

    def _find_routes(self, partition: Partition) -> _Routes | None:
        """Return the routes of a bucket; None if it has no split matrix, which all ranks see alike."""
        owners: dict[str, set[int]] = defaultdict(set)
        for part in partition.segments:
            if part.parameter in self._matrices:
                owners[part.parameter].add(part.owner)
        split = {name: ranks for name, ranks in owners.items() if len(ranks) > 1}
        if not split:
            return None
        parts = [part for part in partition.segments if part.parameter in split]
        rank, ranks = self._group.rank(), range(self._group.size())

        def sent(source: int, target: int) -> list[Segment]:
            if source == target:
                return []
            return [part for part in parts if part.owner == source and target in split[part.parameter]]

        return [sent(rank, one) for one in ranks], [sent(one, rank) for one in ranks]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def _matrices(optimizer: Any) -> Iterator[str]:
    """Yield the names of the parameters that Muon steps."""
    for group, parameters in zip(optimizer.optimizer.param_groups, optimizer.bit16_groups, strict=True):
        if group.get("use_muon", False):
            yield from (optimizer.param_names[parameter] for parameter in parameters)


def count_gathers(optimizer: Any, session: Session, method: str) -> None:
    """Count the bytes that this rank sends while `method` of the optimizer, which gathers matrices for Muon, runs."""
    if any(group.get("use_muon", False) for group in optimizer.optimizer.param_groups):
        session.patches.wrap(optimizer, method, partial(_counted, session.meter))


def _counted(meter: Meter, update: Callable[[], None]) -> None:
    """Call `update` with the methods of DeepSpeed's communication backend replaced by ones that count."""
    counting = {name: partial(_gathered, meter, size_of, getattr(comm.cdb, name)) for name, size_of in _SENT.items()}
    with replaced(comm.cdb, **counting):
        update()


def _gathered(meter: Meter, size_of: Callable[..., int], gather: Any, *args: Any, **options: Any) -> Any:
    size = size_of(*args, **options)
    for kind in ("bytes_sent", "bytes_raw", "bytes_uncompressed"):
        meter.count(kind, size)
    return gather(*args, **options)


def _all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, *_: Any, **__: Any) -> int:
    return ring_all_gather(len(tensor_list) * tensor.nbytes, len(tensor_list))


def _all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> int:
    return ring_all_gather(output_tensor.nbytes, output_tensor.numel() // input_tensor.numel())


_SENT: Mapping[str, Callable[..., int]] = {"all_gather": _all_gather, "all_gather_into_tensor": _all_gather_into_tensor}
"""Methods of DeepSpeed's communication backend with which it gathers matrices, and the bytes that a rank sends."""
