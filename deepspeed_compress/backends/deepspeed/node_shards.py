"""Hybrid sharding: ZeRO 1, 2 or 3 within each node, and the mean of gradient shards over the nodes.

PyTorch calls this HSDP, and the paper MiCS (Zhang et al., https://arxiv.org/abs/2205.00119) hierarchical sharding.
DeepSpeed sees the ranks of one node only (`division`): it reduces gradients over them, which leaves each rank with the
node's mean gradient of its own shard. Before the optimizer steps, ranks of equal place in their nodes replace it with
the mean over all nodes, which is the mean over all ranks of the job. They receive the same bits, so clipping, overflow
checks, skipped steps and the loss scale are the same on all nodes, and so are the weights, which never leave a node.

The exchange takes place at the beginning of the optimizer step, because only then all backward passes of the step are
known to be over.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.backends.deepspeed.division import divide_data
from deepspeed_compress.backends.deepspeed.gradients.early import bucket_size
from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.backends.deepspeed.weights.copies import (
    check_equal_layouts,
    copy_from_first,
    copy_weights,
    named_untrained,
)
from deepspeed_compress.backends.deepspeed.weights.master_weights import MasterSlice, find_master_weights
from deepspeed_compress.collectives.buckets import Partition, even_cut
from deepspeed_compress.collectives.payload import PendingMeans
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.traffic import ring_all_reduce


def equalize_weights(engine: Any, unit: NodeUnit) -> bool:
    """Copy the weights of the first node to the nodes in which they differ. Collective.

    Returns:
        True if the fp32 master weights of any rank differed.

    Raises:
        UnsupportedError: ZeRO 3 has sharded the parameters over other ranks than those of a node.
    """
    masters = find_master_weights(engine)
    check_equal_layouts(masters, unit)
    differs = any(copy_from_first([one.values for one in masters.slices], engine.device, unit.peers))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (differs, {one.parameter for one in masters.slices}))
    changed = any(differs for differs, _ in found)
    if changed:
        masters.publish()
    trained = set(chain.from_iterable(names for _, names in found))
    copy_weights([parameter for _, parameter in named_untrained(engine, trained)], engine.device, unit.peers)
    return changed


CHECK_EVERY = 100
"""Optimizer steps between comparisons of the nodes' weights."""


def attach_nodes(engine: Any, unit: NodeUnit, session: Session) -> "NodeShards":
    """Let `engine` count batches, divide data and save as one job, and return what averages its gradients."""
    patches = session.patches
    divide_data(engine, unit, patches)
    # DeepSpeed knows the batches of a node only.
    patches.wrap(engine, "train_batch_size", partial(_whole_batch, unit.count))
    patches.wrap(engine, "set_train_batch_size", partial(_set_whole_batch, unit.count))
    if unit.number:
        # All nodes hold the same model, so the first one writes it. Every rank still writes its own residuals.
        patches.replace(engine.checkpoint_engine, "save", _save_nothing)
    return NodeShards(engine, unit, session)


def _save_nothing(state_dict: Any, path: str) -> None:
    """Stand in for the `save` of DeepSpeed's checkpoint engine."""


def _whole_batch(nodes: int, original: Callable[[], int]) -> int:
    return nodes * original()


def _set_whole_batch(nodes: int, original: Callable[[int], None], train_batch_size: int) -> None:
    if train_batch_size % nodes:
        raise ValueError(f"train_batch_size must be divisible by the {nodes} nodes, got {train_batch_size}")
    original(train_batch_size // nodes)


@dataclass(frozen=True)
class _Bucket:
    """Slices of this rank's shard that are averaged in one exchange.

    Attributes:
        slices: the slices, each with the number of its group of parameters.
        partition: the same slices in one flat tensor, cut evenly over the nodes.
    """

    slices: Sequence[tuple[int, MasterSlice]]
    partition: Partition


class NodeShards:
    """Mean over the nodes of the gradients of this rank's shard.

    Args:
        engine: an engine with ZeRO 1, 2 or 3 whose `mpu` is `unit`.
        unit: this rank's node.
        session: the engine's session.
    """

    def __init__(self, engine: Any, unit: NodeUnit, session: Session) -> None:
        self._engine, self._optimizer, self._unit, self._session = engine, engine.optimizer, unit, session
        self._scale = 1.0 / unit.count if engine.gradient_average else 1.0
        self._buckets = list(_make_buckets(engine, unit))
        streams = engine.zero_optimization_stage() == 3 and not get_accelerator().resolves_data_dependency()
        # ZeRO 3 looks for overflows on the stream of its reductions.
        self._checks_on = self._optimizer.reduce_and_partition_stream if streams else None

    def average(self) -> None:
        """Replace the gradients that the optimizer is about to step with their mean over the nodes."""
        self._check_weights()
        groups = self._optimizer.averaged_gradients
        starts = {number: _by_start(tensors) for number, tensors in groups.items() if tensors is not None}
        waiting: _Exchange | None = None
        for bucket in self._buckets:
            found = [(starts[number][one.offset], one.numel) for number, one in bucket.slices if number in starts]
            if len(found) < len(bucket.slices):
                # The program has called `step` without a backward pass, on all ranks.
                continue
            started = self._start(bucket.partition, found)
            if waiting is not None:
                waiting.finish()
            waiting = started
        if waiting is not None:
            waiting.finish()
        if self._checks_on is not None:
            self._checks_on.wait_stream(get_accelerator().current_stream())

    def _check_weights(self) -> None:
        """Compare the weights of the nodes now and then, and warn if a program has changed those of one node only."""
        steps = self._engine.global_steps
        if steps and steps % CHECK_EVERY == 0 and equalize_weights(self._engine, self._unit):
            text = (
                f"{self._unit.pointer}: the nodes held different weights before step {steps + 1}, and continue with "
                "those of the first node. Change weights on all nodes alike; GatheredParameters with modifier_rank "
                "changes those of a node"
            )
            warnings.warn(text, CompressWarning, stacklevel=3)

    def _start(self, partition: Partition, found: Sequence[tuple[Tensor, int]]) -> "_Exchange":
        """Begin to average the first `numel` elements of each (tensor, numel) in `found`."""
        flat = torch.cat([tensor.reshape(-1)[:numel] for tensor, numel in found])
        if self._session.alone:
            return _Exchange(found, self._mean(flat), None)
        self._session.meter.count("bytes_uncompressed", ring_all_reduce(flat.nbytes, self._unit.count))
        return _Exchange(found, flat, self._session.start_everywhere(flat, partition, self._scale))

    def _mean(self, flat: Tensor) -> Tensor:
        """Return the uncompressed mean of `flat`, sent in DeepSpeed's dtype for communication."""
        # Divided first, because a sum may overflow fp16.
        sent = flat.mul_(self._scale).to(self._engine.communication_data_type)
        dist.all_reduce(sent, group=self._unit.peers)
        self._session.meter.count_engine_reduction(ring_all_reduce(sent.nbytes, self._unit.count))
        return sent


@dataclass(frozen=True)
class _Exchange:
    """Exchange of one bucket.

    Attributes:
        found: the tensors that the bucket was copied from, and the number of elements of each.
        flat: the bucket.
        pending: the reduction that writes the means to `flat`; None if they are there.
    """

    found: Sequence[tuple[Tensor, int]]
    flat: Tensor
    pending: PendingMeans | None

    def finish(self) -> None:
        """Wait for the means, and copy them to the tensors."""
        if self.pending is not None:
            self.pending.finish(self.flat)
        parts = torch.split(self.flat, [numel for _, numel in self.found])
        for (tensor, numel), part in zip(self.found, parts, strict=True):
            if numel == tensor.numel():
                tensor.copy_(part.view(tensor.shape))
            else:
                # ZeRO 3 pads the last shard of a parameter, which is contiguous.
                tensor.view(-1)[:numel].copy_(part)


def _by_start(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return `tensors`, which lie side by side in a flat buffer, by the place of their first element."""
    found = list(tensors)
    starts = accumulate((tensor.numel() for tensor in found), initial=0)
    return dict(zip(starts, found, strict=False))


def _make_buckets(engine: Any, unit: NodeUnit) -> Iterator[_Bucket]:
    """Yield the buckets of this rank's shard. A slice that is larger than the default bucket has one of its own."""
    optimizer = engine.optimizer
    three = engine.zero_optimization_stage() == 3
    masters = optimizer.fp32_partitioned_groups_flat if three else optimizer.single_partition_of_fp32_groups
    number = {id(master): place for place, master in enumerate(masters)}
    slices = [(number[id(one.home)], one) for one in find_master_weights(engine).slices]
    largest = bucket_size(sum(one.numel for _, one in slices))
    bucket: list[tuple[int, MasterSlice]] = []
    for group, one in slices:
        if bucket and sum(other.numel for _, other in bucket) + one.numel > largest:
            yield _Bucket(bucket, _partition(bucket, unit.count))
            bucket = []
        bucket.append((group, one))
    if bucket:
        yield _Bucket(bucket, _partition(bucket, unit.count))


def _partition(slices: Sequence[tuple[int, MasterSlice]], nodes: int) -> Partition:
    offsets = accumulate((one.numel for _, one in slices), initial=0)
    segments = [
        Segment(one.parameter, one.begin, one.numel, offset, 0)
        for (_, one), offset in zip(slices, offsets, strict=False)
    ]
    return even_cut(segments, nodes)
