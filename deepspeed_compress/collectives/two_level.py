"""Two-level reductions: first among the ranks of a node, then over the slower link between nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, even_cut, relabel, select
from deepspeed_compress.collectives.messages import Transfer
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import reduce_at_once
from deepspeed_compress.compression.segments import Segment, gather, scatter


@dataclass(frozen=True)
class _Levels:
    """The partitions of the two levels.

    Attributes:
        node: the bucket, with each segment assigned to the local rank of its owner.
        mine: this local rank's segments of the bucket.
        across: those segments as a bucket, each assigned to a node.
    """

    node: Partition
    mine: tuple[Segment, ...]
    across: Partition


def _make_levels(locals_: int, nodes: int, local: int, partition: Partition) -> _Levels:
    """Return the levels of local rank `local` out of `locals_`, on one of `nodes` nodes."""
    mine, across = select(partition, lambda segment: segment.owner % locals_ == local)
    return _Levels(
        node=relabel(partition, lambda owner: owner % locals_, locals_),
        mine=mine,
        across=relabel(across, lambda owner: owner // locals_, nodes),
    )


def _make_hybrid_levels(local: int, nodes: int, partition: Partition) -> _Levels:
    """Return the levels of local rank `local`, which owns the same part on each of `nodes` nodes."""
    mine, compact = select(partition, lambda segment: segment.owner == local)
    return _Levels(partition, mine, even_cut(compact.segments, nodes))


class _TwoLevels:
    """Reducers inside a node (`node`) and between nodes (`across`), whose phases each need the previous one."""

    def __init__(
        self, node: PayloadReducer, across: PayloadReducer, make_levels: Callable[[Partition], _Levels]
    ) -> None:
        self.node = node
        self.across = across
        self._levels: Callable[[Partition], _Levels] = lru_cache(maxsize=LAYOUTS)(make_levels)
        # A node's sum could overflow fp16, in which it may be sent. Scaling by a power of two causes no rounding.
        self._node_factor = float(1 << (node.group.size() - 1).bit_length())

    def _node_sum(self, bucket: Tensor, partition: Partition) -> Tensor:
        """Return `bucket` in fp32, with this rank's segments replaced by their sum over the node / `_node_factor`."""
        whole = bucket.to(torch.float32, copy=True)
        self.node.reduce_scatter(whole, partition, 1.0 / self._node_factor)
        return whole


class HierarchicalReducer(_TwoLevels):
    """Reducer over `group`, whose ranks are `local + node * ranks_per_node`.

    `node` reduces over the ranks of one node, in their order. `across` reduces over the ranks with the same local rank,
    one per node, in the order of nodes. Every element crosses the link between nodes once per node instead of once per
    rank.
    """

    def __init__(self, group: ProcessGroup, node: PayloadReducer, across: PayloadReducer) -> None:
        super().__init__(node, across, partial(_make_levels, node.group.size(), across.group.size(), node.group.rank()))
        self.group = group

    start_reduce_scatter = reduce_at_once

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace this rank's own segments of `bucket` by `scale` times their sum over the ranks, and no others."""
        levels = self._levels(partition)
        whole = self._node_sum(bucket, levels.node)
        part = gather(whole, levels.mine)
        self.across.reduce_scatter(part, levels.across, scale * self._node_factor)
        own, _ = select(levels.across, lambda segment: segment.owner == self.across.group.rank())
        scatter(gather(part, own), partition.owned_by(self.group.rank()), bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace all of `bucket` by `scale` times its sum over the ranks, with the same bits on every rank."""
        levels = self._levels(partition)
        whole = self._node_sum(bucket, levels.node)
        part = gather(whole, levels.mine)
        self.across.all_reduce(part, levels.across, scale * self._node_factor)
        scatter(part, levels.mine, whole)
        self.node.all_gather(whole, levels.node)
        bucket.copy_(whole)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        levels = self._levels(partition)
        inside = self.node.transfers(levels.node, everywhere)
        return (*inside, *self.across.transfers(levels.across, everywhere))


class HybridReducer(_TwoLevels):
    """Reducer (see `Reducer`) to the ranks of a node, each of which owns the same part on every node.

    `node` reduce-scatters over the ranks of one node, which own the segments of the partition. `across` all-reduces
    each part over the ranks that own it, one per node. All nodes get the same bits, and each rank sends only its part
    over the link between nodes.
    """

    def __init__(self, node: PayloadReducer, across: PayloadReducer) -> None:
        super().__init__(node, across, partial(_make_hybrid_levels, node.group.rank(), across.group.size()))

    @property
    def group(self) -> ProcessGroup:
        return self.node.group

    start_reduce_scatter = reduce_at_once

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace this rank's own segments of `bucket` by `scale` times their sum over all ranks, and no others."""
        levels = self._levels(partition)
        own = gather(self._node_sum(bucket, partition), levels.mine)
        self.across.all_reduce(own, levels.across, scale * self._node_factor)
        scatter(own, levels.mine, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace all of `bucket` by `scale` times its sum over all ranks, with the same bits on every rank."""
        self.reduce_scatter(bucket, partition, scale)
        self.node.all_gather(bucket, partition)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        inside = self.node.transfers(partition, everywhere)
        return (*inside, *self.across.transfers(self._levels(partition).across, True))
