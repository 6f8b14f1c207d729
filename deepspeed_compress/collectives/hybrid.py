"""Two-level reduction if every node holds a copy of the model, sharded over its ranks (hybrid sharding, HSDP)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, even_cut, select
from deepspeed_compress.collectives.messages import Transfer
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Pending, reduce_at_once
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, gather, scatter


@dataclass(frozen=True)
class _Part:
    """This rank's share of a bucket: the segments that are `mine`, and the same segments cut evenly over the nodes."""

    mine: tuple[Segment, ...]
    across: Partition


def _make_part(rank: int, nodes: int, partition: Partition) -> _Part:
    mine, compact = select(partition, lambda segment: segment.owner == rank)
    return _Part(mine, even_cut(compact.segments, nodes))


class HybridReducer:
    """Reducer (see `Reducer`) to the ranks of a node, each of which owns the same part on every node.

    `node` reduce-scatters over the ranks of one node, which own the segments of the partition. `across` all-reduces
    each part over the ranks that own it, one per node. All nodes get the same bits, and each rank sends only its part
    over the link between nodes.
    """

    def __init__(self, node: PayloadReducer, across: PayloadReducer) -> None:
        self.node = node
        self.across = across
        # A node's sum could overflow fp16, in which it may be sent. Scaling by a power of two causes no rounding.
        self._node_factor = float(1 << (node.group.size() - 1).bit_length())
        shape = (node.group.rank(), across.group.size())
        self._part: Callable[[Partition], _Part] = lru_cache(maxsize=LAYOUTS)(partial(_make_part, *shape))

    @property
    def group(self) -> ProcessGroup:
        return self.node.group

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Reduce at once, because every phase needs the previous one; see `Reducer`."""
        return reduce_at_once(self, bucket, partition, scale)

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace this rank's own segments of `bucket` by `scale` times their sum over all ranks, and no others."""
        part, whole = self._part(partition), bucket.to(torch.float32, copy=True)
        self.node.reduce_scatter(whole, partition, 1.0 / self._node_factor)
        own = gather(whole, part.mine)
        self.across.all_reduce(own, part.across, scale * self._node_factor)
        scatter(own, part.mine, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace all of `bucket` by `scale` times its sum over all ranks, with the same bits on every rank."""
        self.reduce_scatter(bucket, partition, scale)
        self.node.all_gather(bucket, partition)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        inside = self.node.transfers(partition, everywhere)
        return (*inside, *self.across.transfers(self._part(partition).across, True))

    def stored(self, partition: Partition) -> tuple[tuple[Residuals, int], ...]:
        return ()
