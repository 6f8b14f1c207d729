"""Gradients of the shard of a rank, which are averaged over the nodes, during backward and after it.

DeepSpeed reduces buckets inside the node during backward, and hands the sums of all micro-steps to the optimizer after
it. A slice can be read from DeepSpeed's buffers once its bucket is reduced at the accumulation boundary. The program
may still change it, by another backward pass for instance, so what was read early is compared with what the optimizer
is about to step (see `EarlyReductions`).

With `offload_optimizer`, DeepSpeed moves reduced gradients to the host while it reduces, and notes their norms and
whether one is not finite at the same time. These notes are of one node. After the nodes have averaged the gradients,
norms are noted anew from the means, and nodes agree on whether to skip the step, so that all of them clip and skip
alike.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from deepspeed_compress.backends.deepspeed.engine_facts import bucket_size
from deepspeed_compress.backends.deepspeed.gradients.early import reduces_now
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.backends.deepspeed.versions import is_compact, is_last_micro_batch, may_defer_reductions
from deepspeed_compress.backends.deepspeed.weights.master_weights import MasterSlice, find_master_weights, segments_of
from deepspeed_compress.collectives.buckets import Partition, even_cut
from deepspeed_compress.session.patches import Patches

SEAMS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow", "self partition_gradients"),
    Seam("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.has_overflow"),
)
"""DeepSpeed functions replaced here. The ZeRO 3 one is wrapped for profiling, so only its presence can be checked."""

Key = tuple[int, int]
"""Identity of a slice of a shard: (number of its group of parameters, first element in that group's shard)."""
Found = list[tuple[Tensor, int]]
"""Gradients of slices in order, each as a tensor whose first elements they are, and the number of these."""


def may_average_early(engine: Any) -> bool:
    """Return True if gradients may be averaged over the nodes during backward.

    This requires gradients that DeepSpeed does not move elsewhere meanwhile.
    """
    return not offloads_optimizer(engine) and may_defer_reductions()


class NodeGradients:
    """Gradients of this rank's shard; see `Gradients`.

    Args:
        engine: an engine with ZeRO 1, 2 or 3 whose `mpu` is `unit`.
        unit: this rank's node.
        patches: undoes changes of the optimizer.

    Attributes:
        buckets: the slices that are averaged together, for each exchange. A slice that is larger than the default
            bucket has one of its own.
    """

    everywhere = True

    def __init__(self, engine: Any, unit: NodeUnit, patches: Patches) -> None:
        self.group = unit.peers
        self.asking = _get_default_group()
        self.device = torch.device(engine.device)
        self.scale = 1.0 / unit.count if engine.gradient_average else 1.0
        self._engine, self._optimizer = engine, engine.optimizer
        self._parameters = {name: parameter for parameter, name in engine.param_names.items()}
        self._slices = _find_slices(engine)
        self._keys: dict[str, list[Key]] = defaultdict(list)
        """Keys of the slices of each parameter."""
        for key, one in self._slices.items():
            self._keys[one.parameter].append(key)
        self.buckets = tuple(_make_buckets(self._slices))
        self._partitions = {
            keys: even_cut(list(segments_of(self._slices[key] for key in keys)), unit.count) for keys in self.buckets
        }
        self._offloaded = OffloadedGradients(engine, unit, patches) if offloads_optimizer(engine) else None
        self._due: Mapping[Key, Tensor] | None = None
        """Gradients that the optimizer is about to step, by their slices; None before the step."""

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Read gradients from what DeepSpeed has handed to the optimizer, in the block, which averages them."""
        self._due = self._averaged() if self._offloaded is None else self._offloaded.take(self._slices)
        try:
            yield
        finally:
            self._due = None
        if self._offloaded is not None:
            self._offloaded.note_means()

    def _averaged(self) -> dict[Key, Tensor]:
        found = {}
        for number, tensors in self._optimizer.averaged_gradients.items():
            start = 0
            for tensor in () if tensors is None else tensors:
                if (number, start) in self._slices:
                    found[number, start] = tensor
                start += tensor.numel()
        return found

    def find(self, keys: tuple[Key, ...]) -> Found | None:
        """Return the gradients of a bucket that were handed over, in order.

        None if the program has called `step` without a backward pass, on all ranks.
        """
        assert self._due is not None
        if not self._due.keys() >= set(keys):
            return None
        return [(self._due[key], self._slices[key].numel) for key in keys]

    def hooked(self) -> Iterator[tuple[Any, Key]]:
        """Return nothing: gradients are complete when DeepSpeed has reduced them, not when autograd has."""
        return iter(())

    def of(self, key: Key) -> Tensor:
        one = self._slices[key]
        if self._due is None:
            return self._reduced(key[0], one)
        return self._due[key].reshape(-1)[: one.numel] if key in self._due else torch.zeros_like(one.values)

    def due(self) -> Iterable[Key]:
        return () if self._due is None else self._due.keys()

    def partition(self, keys: tuple[Key, ...]) -> Partition:
        return self._partitions[keys]

    def side_by_side(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        """Return `keys` unchanged: a bucket is divided evenly, whatever its order."""
        return keys

    def complete_now(self) -> bool:
        return reduces_now(self._engine) and is_last_micro_batch(self._optimizer)

    def follow(self, complete: Callable[[Key], None], patches: Patches) -> None:
        """Call `complete` for every slice whose bucket DeepSpeed has reduced inside the node."""
        if self._engine.zero_optimization_stage() == 3:
            patches.wrap(self._optimizer, "partition_grads", partial(self._partitioned, complete))
        else:
            patches.wrap(self._optimizer, "reduce_ipg_grads", partial(self._reduced_buckets, complete))

    def _partitioned(
        self,
        complete: Callable[[Key], None],
        original: Callable[..., Any],
        params_to_release: list[Any],
        grad_partitions: list[Tensor],
    ) -> Any:
        """Call `partition_grads` of ZeRO 3, which adds a reduced bucket to the shard."""
        parameters = list(params_to_release)
        buffers = original(params_to_release, grad_partitions)
        self._announce(parameters, complete)
        return buffers

    def _reduced_buckets(
        self, complete: Callable[[Key], None], original: Callable[..., Any], comm_dtype: torch.dtype | None = None
    ) -> None:
        """Call `reduce_ipg_grads` of ZeRO 1 and 2, which reduces the bucket of a dtype, or those of all."""
        optimizer = self._optimizer
        buckets = list(optimizer.ipg_buckets.values()) if comm_dtype is None else [optimizer.ipg_buckets[comm_dtype]]
        parameters = [optimizer.bit16_groups[group][place] for one in buckets for group, place, _ in one.params]
        original(comm_dtype=comm_dtype)
        self._announce(parameters, complete)

    def _announce(self, parameters: Iterable[Any], complete: Callable[[Key], None]) -> None:
        for parameter in parameters:
            for key in self._keys.get(self._engine.param_names[parameter], ()):
                complete(key)

    def _reduced(self, group: int, one: MasterSlice) -> Tensor:
        """Return the sum of all micro-steps so far, from DeepSpeed's buffers."""
        optimizer, parameter = self._optimizer, self._parameters[one.parameter]
        if self._engine.zero_optimization_stage() == 3:
            shards = vars(optimizer)["_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"]
            shard: Tensor = shards[parameter.ds_id]
            return shard.reshape(-1)[: one.numel]
        if is_compact(optimizer, group):
            buffers = optimizer.averaged_gradients.get(group)
            return torch.zeros_like(one.values) if buffers is None else one.within(buffers.flat_partition)
        return _reduced_slice(optimizer, group, parameter, one)


def _reduced_slice(optimizer: Any, group: int, parameter: Any, one: MasterSlice) -> Tensor:
    """Return the gradient of a slice under ZeRO 1 or 2, added to those of earlier micro-steps as DeepSpeed will do."""
    part = slice(one.begin, one.begin + one.numel)
    gradient = optimizer.get_gradient_for_reduction(parameter)
    newest: Tensor = torch.zeros_like(one.values) if gradient is None else gradient.detach().reshape(-1)[part]
    earlier = optimizer.all_grad_tensors.get(group)
    if earlier is None:
        return newest
    place = next(place for place, other in enumerate(optimizer.params_in_partition[group]) if other is parameter)
    total: Tensor = earlier[place].detach().reshape(-1)[part].add(newest)
    return total


def _find_slices(engine: Any) -> dict[Key, MasterSlice]:
    optimizer = engine.optimizer
    three = engine.zero_optimization_stage() == 3
    masters = optimizer.fp32_partitioned_groups_flat if three else optimizer.single_partition_of_fp32_groups
    number = {id(master): place for place, master in enumerate(masters)}
    return {(number[id(one.home)], one.offset): one for one in find_master_weights(engine).slices}


def _make_buckets(slices: Mapping[Key, MasterSlice]) -> Iterator[tuple[Key, ...]]:
    largest = bucket_size(sum(one.numel for one in slices.values()))
    bucket: list[Key] = []
    filled = 0
    for key, one in slices.items():
        if bucket and filled + one.numel > largest:
            yield tuple(bucket)
            bucket, filled = [], 0
        bucket.append(key)
        filled += one.numel
    if bucket:
        yield tuple(bucket)


def offloads_optimizer(engine: Any) -> bool:
    """Return True if the optimizer states of `engine` are in host memory."""
    optimizer = engine.optimizer
    three = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    return bool(optimizer.offload_optimizer if three else optimizer.cpu_offload)


class OffloadedGradients:
    """Gradients of this rank's shard in host memory.

    Args:
        engine: an engine with `offload_optimizer`.
        unit: this rank's node.
        patches: restores DeepSpeed's check for overflows.
    """

    def __init__(self, engine: Any, unit: NodeUnit, patches: Patches) -> None:
        self._engine, self._optimizer, self._unit = engine, engine.optimizer, unit
        self._parameters = {name: parameter for parameter, name in engine.param_names.items()}
        self._used: list[MasterSlice] = []
        """Slices whose parameters some node uses in the running step."""
        self._finite = True
        """True if the means of the running step are finite."""
        patches.wrap(self._optimizer, "has_overflow", self._has_overflow)

    def take(self, slices: Mapping[Key, MasterSlice]) -> dict[Key, Tensor]:
        """Return the gradients of `slices`, as flat views of DeepSpeed's buffers. Collective.

        A buffer keeps the gradient of an earlier step if this step does not use its parameter. If another node does
        use it, zeros count here. If no node does, a copy is returned, because DeepSpeed steps what the buffer has.

        Returns:
            All gradients; none if no node has had a backward pass.
        """
        noted = [self._identity(one) in self._optimizer.norm_for_param_grads for one in slices.values()]
        used = self._on_any_node(noted)
        self._used = [one for one, is_used in zip(slices.values(), used, strict=True) if is_used]
        gradients: dict[Key, Tensor] = {}
        for (key, one), here, anywhere in zip(slices.items(), noted, used, strict=True):
            gradient = _gradient(one)
            if anywhere and not here:
                gradient.zero_()
            gradients[key] = gradient if anywhere else gradient.clone()
        return gradients if self._used else {}

    def note_means(self) -> None:
        """Replace the norms that DeepSpeed has noted by those of the means over the nodes."""
        norms = {self._identity(one): _gradient(one).double().norm(2) for one in self._used}
        self._optimizer.norm_for_param_grads.update(norms)
        self._finite = all(norm.isfinite() for norm in norms.values())

    def _has_overflow(self, original: Callable[..., bool], *args: Any, **options: Any) -> bool:
        """Return True if any node skips the step. Collective.

        DeepSpeed also finds overflows that are in no mean: those of gradients that the program has given up.
        """
        return any(self._on_any_node([original(*args, **options) or not self._finite]))

    def _on_any_node(self, found: list[bool]) -> list[bool]:
        """Return for each of `found` whether it is True on a rank of equal place in any node. Collective."""
        anywhere = torch.tensor(found, dtype=torch.uint8, device=self._engine.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._unit.peers)
        return [bool(one) for one in anywhere.tolist()]

    def _identity(self, one: MasterSlice) -> int:
        return int(self._optimizer.get_param_id(self._parameters[one.parameter]))


def _gradient(one: MasterSlice) -> Tensor:
    """Return the gradient of a slice, as a flat view of the buffer that DeepSpeed keeps for an offloaded optimizer."""
    assert one.home.grad is not None, "DeepSpeed allocates the gradients of offloaded optimizers with their states"
    return one.within(one.home.grad)
