"""Access to the fp32 master weights that a rank steps under each ZeRO stage, and their publication to other ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.buckets import even_partition, flat_sizes
from deepspeed_compress.compression.segments import PADDING, Segment
from deepspeed_compress.errors import UnsupportedError

SEAMS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params", "self"),
    Seam("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.update_lp_params", "self"),
    Seam("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters"),
)
"""DeepSpeed functions used here. The ZeRO 3 one is wrapped for profiling, so only its presence can be checked."""


@dataclass(frozen=True)
class MasterSlice:
    """A slice of `numel` elements of a parameter, and their place in the tensor that the optimizer steps.

    Attributes:
        parameter: the name of the parameter.
        begin: the first element, in the flattened parameter.
        home: the tensor that the optimizer steps, of any floating dtype and device.
        offset: the first element, in the flattened `home`.
        numel: the number of elements.
    """

    parameter: str
    begin: int
    home: Tensor
    offset: int
    numel: int

    @property
    def values(self) -> Tensor:
        """Return the elements as a flat view of `home`."""
        return self.within(self.home)

    def within(self, tensor: Tensor) -> Tensor:
        """Return a flat view of the same elements of `tensor`.

        `tensor` has the layout of `home`, as optimizer states do.
        """
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)

    def part(self, begin: int, end: int) -> "MasterSlice":
        """Return the part that lies in elements `begin` to `end` (exclusive) of the parameter; perhaps empty."""
        first, last = max(self.begin, begin), min(self.begin + self.numel, end)
        return replace(self, begin=first, offset=self.offset + first - self.begin, numel=max(0, last - first))


def segments_of(slices: Iterable[MasterSlice]) -> Iterator[Segment]:
    """Yield the segments of the flat vector that has the elements of `slices`, in order."""
    offset = 0
    for one in slices:
        yield Segment(one.parameter, one.begin, one.numel, offset, 0)
        offset += one.numel


@dataclass(frozen=True)
class FlatMasterWeights:
    """Master weights of this rank as one flat vector; see `MasterWeights`.

    Attributes:
        slices: the slices that this rank exchanges, without padding.
        device: the device of the exchange.
        publish: a function that sends the changed master weights to the other ranks' copies.
        stepped: all slices that this rank steps. Without ZeRO, each rank steps all of them and exchanges only a part.
    """

    slices: Sequence[MasterSlice]
    device: torch.device
    publish: Callable[[], None]
    stepped: Sequence[MasterSlice]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the flat vector, in order."""
        return tuple(segments_of(self.slices))

    @cached_property
    def _of(self) -> dict[str, list[MasterSlice]]:
        found: dict[str, list[MasterSlice]] = {}
        for one in self.slices:
            found.setdefault(one.parameter, []).append(one)
        return found

    def _views(self, segments: Sequence[Segment]) -> Iterator[Tensor]:
        for segment in segments:
            homes = self._of[segment.parameter]
            home = next(one for one in homes if 0 <= segment.begin - one.begin < one.numel)
            yield home.values.narrow(0, segment.begin - home.begin, segment.numel)

    def read(self, segments: Sequence[Segment]) -> Tensor:
        """Return the elements of `segments` as one flat fp32 tensor on `device`."""
        views = [view.to(self.device, torch.float32) for view in self._views(segments)]
        return torch.cat(views) if views else torch.zeros(0, device=self.device)

    def write(self, segments: Sequence[Segment], values: Tensor) -> None:
        """Write the flat tensor `values` into the elements of `segments`."""
        parts = torch.split(values, [segment.numel for segment in segments])
        for view, part in zip(self._views(segments), parts, strict=True):
            view.copy_(part)


@dataclass(frozen=True)
class FlatBuffers:
    """Names of the attributes in which an optimizer class has weights in flat buffers, one for each parameter group.

    Attributes:
        module: the module that defines its `step`.
        parameters: the attribute that lists the parameters of each group.
        held: the attribute that lists the flat weight buffer of each group.
        masters: the attribute that lists this rank's fp32 master weights of each group.
    """

    module: ModuleType
    parameters: str
    held: str
    masters: str


FLAT_BUFFERS: Mapping[type, FlatBuffers] = {
    stage_1_and_2.DeepSpeedZeroOptimizer: FlatBuffers(
        stage_1_and_2, "bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"
    ),
    bf16_optimizer.BF16_Optimizer: FlatBuffers(
        bf16_optimizer, "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"
    ),
}


def find_master_weights(engine: Any) -> FlatMasterWeights:
    """Return the master weights of `engine`.

    Raises:
        UnsupportedError: the optimizer's master weights are not known to this package.
    """
    for kind, buffers in FLAT_BUFFERS.items():
        if isinstance(engine.optimizer, kind):
            return _of_buffers(engine, buffers)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _zero_3(engine)
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return _without_zero(engine)
    raise UnsupportedError(
        f"/deepspeed_compress/islands: the fp32 master weights of {type(engine.optimizer).__name__} are not known "
        '(allowed: fp32 without ZeRO, ZeRO 1 to 3); write "zero_optimization": {"stage": 1}'
    )


def _of_buffers(engine: Any, buffers: FlatBuffers) -> FlatMasterWeights:
    """Return the master weights of ZeRO 1, ZeRO 2 or the bf16 optimizer.

    Each flat buffer is divided evenly over its ranks, and the master weights are this rank's parts.
    """
    slices: list[MasterSlice] = []
    names = (buffers.held, buffers.parameters, buffers.masters, "real_dp_process_group")
    lists = (getattr(engine.optimizer, name) for name in names)
    for buffer, parameters, master, group in zip(*lists, strict=True):
        named = [(engine.param_names[parameter], parameter) for parameter in parameters]
        partition = even_partition(flat_sizes(buffer, named), group.size())
        own = partition.owned_by(group.rank())
        first = own[0].offset if own else 0
        slices += [
            MasterSlice(part.parameter, part.begin, master, part.offset - first, part.numel)
            for part in own
            if part.parameter != PADDING
        ]
    return FlatMasterWeights(slices, torch.device(engine.device), partial(_publish_buffers, engine), slices)


def _publish_buffers(engine: Any) -> None:
    """Update the weights on all ranks from the master weights.

    Compressed weights have their own bookkeeping, in the session; otherwise DeepSpeed gathers.
    """
    session = vars(engine).get("compression")
    if session is not None and session.exact is not None:
        session.renew_weights()
    else:
        engine.optimizer.update_lp_params()


def _zero_3(engine: Any) -> FlatMasterWeights:
    optimizer, slices = engine.optimizer, []
    if any(flat is None for flat in optimizer.fp16_partitioned_groups_flat):
        raise UnsupportedError(
            '/zero_optimization/offload_param/device: "nvme" keeps weights in files, which are neither exchanged nor '
            'compared (allowed: "cpu", "none"); write "cpu"'
        )
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()
            begin = size * parameter.ds_process_group.rank()
            numel = max(0, min(size, parameter.ds_numel - begin))
            if numel:
                slices.append(MasterSlice(engine.param_names[parameter], begin, master, offset, numel))
            offset += size
    return FlatMasterWeights(slices, torch.device(engine.device), partial(_publish_partitions, optimizer), slices)


def _publish_partitions(optimizer: Any) -> None:
    """Update the ZeRO 3 partitions and the gathered persistent parameters, as DeepSpeed's `step` does."""
    for number in range(len(optimizer.fp16_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    gather_again(optimizer.persistent_parameters)


def gather_again(persistent: list[Any]) -> None:
    """Renew the whole copies of small parameters that ZeRO 3 keeps, from the shards."""
    if persistent:
        # Gathering skips parameters that are available, so partition them first.
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def _without_zero(engine: Any) -> FlatMasterWeights:
    """Return the master weights without ZeRO, which are the parameters themselves.

    Every rank has all of them. Each rank exchanges a part and broadcasts it within the island.
    """
    group: ProcessGroup = engine.seq_data_parallel_group
    whole = {
        name: MasterSlice(name, 0, parameter, 0, parameter.numel())
        for parameter, name in engine.param_names.items()
        if parameter.requires_grad
    }
    partition = even_partition([(name, one.numel) for name, one in whole.items()], group.size())
    slices = [
        whole[part.parameter].part(part.begin, part.begin + part.numel) for part in partition.owned_by(group.rank())
    ]
    publish = partial(_share_all, whole, partition, group)
    return FlatMasterWeights(slices, torch.device(engine.device), publish, list(whole.values()))


def _share_all(whole: Mapping[str, MasterSlice], partition: Any, group: ProcessGroup) -> None:
    """Broadcast each part of `whole` from its owner to the other ranks of `group`."""
    for owner in range(group.size() if group.size() > 1 else 0):
        parts = partition.owned_by(owner)
        views = [whole[part.parameter].values.narrow(0, part.begin, part.numel) for part in parts]
        if views:
            values = torch.cat(views)
            dist.broadcast(values, dist.get_global_rank(group, owner), group=group)
            for view, part in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
                view.copy_(part)
