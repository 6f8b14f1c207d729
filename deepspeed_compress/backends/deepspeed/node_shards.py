"""Hybrid sharding: ZeRO 1, 2 or 3 within each node, and the mean of gradient shards over the nodes.

PyTorch calls this HSDP, and the paper MiCS (Zhang et al., https://arxiv.org/abs/2205.00119) hierarchical sharding.
DeepSpeed sees the ranks of one node only (`division`): it reduces gradients over them, which leaves each rank with the
node's mean gradient of its own shard. Before the optimizer steps, ranks of equal place in their nodes replace it with
the mean over all nodes, which is the mean over all ranks of the job. They receive the same bits, so clipping, overflow
checks, skipped steps and the loss scale are the same on all nodes, and so are the weights, which never leave a node.

Buckets leave during the last backward pass, as soon as DeepSpeed has reduced them inside the node: in a thread on CPU,
on a stream of their own on GPU. They count only if they hold what the optimizer is about to step; otherwise the
exchange takes place at the beginning of the step.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import Tensor

from deepspeed_compress.backends.deepspeed.division import divide_data
from deepspeed_compress.backends.deepspeed.engine_facts import limit_bucket_size
from deepspeed_compress.backends.deepspeed.gradients.background import MeansStream, MeansThread
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from deepspeed_compress.backends.deepspeed.node_gradients import Found, Key, NodeGradients, may_average_early
from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.backends.deepspeed.weights.copies import (
    check_equal_layouts,
    copy_from_first,
    copy_weights,
    named_untrained,
)
from deepspeed_compress.backends.deepspeed.weights.master_weights import find_master_weights
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.payload import PendingMeans
from deepspeed_compress.monitor import ring_all_reduce
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def equalize_weights(engine: Any, unit: NodeUnit) -> None:
    """Copy the weights of the first node to the others. Collective.

    Raises:
        UnsupportedError: ZeRO 3 has sharded the parameters over other ranks than those of a node.
    """
    masters = find_master_weights(engine)
    check_equal_layouts(masters, unit)
    copy_from_first([one.values for one in masters.slices], engine.device, unit.peers)
    masters.publish()
    trained = set(chain.from_iterable(gather_objects({one.parameter for one in masters.slices})))
    copy_weights([one for _, one in named_untrained(engine, trained)], engine.device, unit.peers)


def attach_nodes(engine: Any, unit: NodeUnit, session: Session) -> "NodeShards":
    """Let `engine` count batches, divide data and save as one job, and return what averages its gradients.

    DeepSpeed's dynamic batching and curriculum ask for `data_parallel_group`, `set_train_batch_size` for
    `dp_world_size`, and programs for both. Shards have groups of their own: `seq_data_parallel_group`, and
    `dp_process_group` of the optimizer.
    """
    patches = session.patches
    divide_data(engine, unit, patches)
    whole = dist.group.WORLD if unit.tensor == 1 else groups.get_data_parallel_group()
    patches.replace(engine, "data_parallel_group", whole)
    patches.replace(engine, "dp_world_size", unit.share_of_job[1])
    # Not restored: a program may set another size, and the engine stays divided for as long as it exists.
    engine._config.train_batch_size = engine.tput_timer.batch_size = unit.count * engine.train_batch_size()
    local = engine.use_node_local_storage()
    if not (int(engine.local_rank) < len(unit.ranks) if local else unit.number == 0):
        # The first node, or that of each host, writes the model. Every rank still writes its own residuals.
        patches.replace(engine.checkpoint_engine, "save", _save_nothing)
    return NodeShards(engine, unit, session)


def _save_nothing(state_dict: Any, path: str) -> None:
    """Stand in for the `save` of DeepSpeed's checkpoint engine."""


class NodeShards:
    """Mean over the nodes of the gradients of this rank's shard.

    Args:
        engine: an engine with ZeRO 1, 2 or 3 whose `mpu` is `unit`.
        unit: this rank's node.
        session: the engine's session.
    """

    def __init__(self, engine: Any, unit: NodeUnit, session: Session) -> None:
        self._engine, self._unit, self._session = engine, unit, session
        self._gradients = NodeGradients(engine, unit, session.patches)
        self._early: EarlyReductions | None = None
        self._stream: Any = None
        """Stream of a GPU on which DeepSpeed reduces gradients inside the node; None for the current one."""
        three = engine.zero_optimization_stage() == 3
        if not get_accelerator().is_synchronized_device() and (three or engine.optimizer.overlap_comm):
            optimizer = engine.optimizer
            self._stream = optimizer.reduce_and_partition_stream if three else optimizer.reduction_stream
        # Steps of DeepSpeed alone exchange uncompressed gradients, after backward.
        session.replace_reduction(self._overlap, lambda patches: None)

    def _overlap(self, patches: Patches) -> None:
        """Begin to average buckets during backward."""
        if not may_average_early(self._engine):
            return
        background = MeansThread() if get_accelerator().is_synchronized_device() else MeansStream(self._stream)
        early = EarlyReductions(self._session, self._gradients, self._exchange, patches, background)
        self._gradients.follow(early.note_complete, patches)
        # Not the elements of this rank's shard, because other ranks of the node have more or fewer.
        trained = (parameter for parameter in self._engine.param_names if parameter.requires_grad)
        numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        limit_bucket_size(self._engine, numel, patches)
        patches.replace(self, "_early", early)

    def average(self) -> None:
        """Replace the gradients that the optimizer is about to step with their mean over the nodes."""
        with self._gradients.handed_over():
            (self._exchange if self._early is None else self._early.reduce)()
        if self._stream is not None:
            # ZeRO 3 looks for overflows there.
            self._stream.wait_stream(get_accelerator().current_stream())

    def _exchange(self) -> None:
        """Average all buckets. Those that were sent during backward are only waited for."""
        finish: Callable[[], None] | None = None
        for keys in self._gradients.buckets:
            found = self._gradients.find(keys)
            if found is not None:
                # A bucket begins before the one before it is waited for.
                before, finish = finish, self._start(keys, found)
                if before is not None:
                    before()
        if finish is not None:
            finish()

    def _start(self, keys: tuple[Key, ...], found: Found) -> Callable[[], None]:
        """Begin to average a bucket, or go on with what began during backward. Return what finishes this."""
        dtype, numel = found[0][0].dtype, sum(numel for _, numel in found)
        meter = self._session.meter
        if self._session.alone:
            # Divided before it is sent in DeepSpeed's dtype for communication, because a sum may overflow fp16.
            sent = self._flat(found).mul_(self._gradients.scale).to(self._engine.communication_data_type)
            dist.all_reduce(sent, group=self._unit.peers)
            meter.count_engine_reduction(ring_all_reduce(sent.nbytes, self._unit.count))
            return partial(_finish, found, sent, None)
        meter.count("bytes_uncompressed", ring_all_reduce(numel * dtype.itemsize, self._unit.count))
        begun: PendingMeans | None = None if self._early is None else self._early.take(dtype, dtype, keys)
        if begun is not None:
            return partial(_finish, found, begun.bucket, begun)
        flat, gradients = self._flat(found), self._gradients
        pending = self._session.gradients.start_everywhere(flat, gradients.partition(keys), gradients.scale)
        return partial(_finish, found, flat, pending)

    def _flat(self, found: Found) -> Tensor:
        return torch.cat([tensor.reshape(-1)[:numel] for tensor, numel in found]).to(self._engine.device)


def _finish(found: Found, flat: Tensor, pending: PendingMeans | None) -> None:
    """Finish the exchange of one bucket: wait for the means, and copy them to the tensors.

    Args:
        found: the tensors that the bucket was copied from, and the number of elements of each.
        flat: the bucket.
        pending: the reduction that writes the means to `flat`; None if they are there.
    """
    if pending is not None:
        pending.finish(flat)
    parts = torch.split(flat, [numel for _, numel in found])
    for (tensor, numel), part in zip(found, parts, strict=True):
        if numel == tensor.numel():
            tensor.copy_(part.view(tensor.shape))
        else:
            # ZeRO 3 pads the last shard of a parameter, which is contiguous.
            tensor.view(-1)[:numel].copy_(part)
