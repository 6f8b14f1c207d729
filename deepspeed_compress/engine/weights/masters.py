"""The fp32 weights that a rank steps under each ZeRO stage, as one flat vector, and how the others get to see them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import even_partition
from deepspeed_compress.compression.segments import PADDING, Segment
from deepspeed_compress.engine.seams import Seam
from deepspeed_compress.engine.weights.zero_12 import flat_sizes
from deepspeed_compress.errors import UnsupportedError

__all__ = ["SEAMS", "FlatMasters", "find_masters"]

SEAMS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params", ("self",)),
    Seam("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.update_lp_params", ("self",)),
    Seam(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters",
        ("args", "kwargs"),
    ),
)
"""The second is wrapped for profiling: its presence is all that can be checked."""


@dataclass(frozen=True)
class Stretch:
    """`numel` elements of a parameter from `begin` on, which are those from `offset` on of `home`: what the optimizer
    steps, of any floating type and device."""

    parameter: str
    begin: int
    home: Tensor
    offset: int
    numel: int

    @property
    def values(self) -> Tensor:
        """A flat view."""
        return self.within(self.home)

    def within(self, tensor: Tensor) -> Tensor:
        """A flat view of the same elements of a `tensor` laid out as `home`, such as a state of the optimizer."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)

    def part(self, begin: int, end: int) -> "Stretch":
        """What there is of elements `begin` to `end`, exclusive, of the parameter."""
        first, last = max(self.begin, begin), min(self.begin + self.numel, end)
        return replace(self, begin=first, offset=self.offset + first - self.begin, numel=max(0, last - first))


@dataclass(frozen=True)
class FlatMasters:
    """See `Masters`. `stretches`: of this rank, without padding. `device`: of the exchange. `stepped`: all that this
    rank steps, of which ranks without ZeRO exchange a part each."""

    stretches: Sequence[Stretch]
    device: torch.device
    publish: Callable[[], None]
    stepped: Sequence[Stretch]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        found: list[Segment] = []
        offset = 0
        for one in self.stretches:
            found.append(Segment(one.parameter, one.begin, one.numel, offset, 0))
            offset += one.numel
        return tuple(found)

    @cached_property
    def _of(self) -> dict[str, list[Stretch]]:
        found: dict[str, list[Stretch]] = {}
        for one in self.stretches:
            found.setdefault(one.parameter, []).append(one)
        return found

    def _views(self, segments: Sequence[Segment]) -> Iterator[Tensor]:
        for segment in segments:
            homes = self._of[segment.parameter]
            home = next(one for one in homes if 0 <= segment.begin - one.begin < one.numel)
            yield home.values.narrow(0, segment.begin - home.begin, segment.numel)

    def read(self, segments: Sequence[Segment]) -> Tensor:
        views = [view.to(self.device, torch.float32) for view in self._views(segments)]
        return torch.cat(views) if views else torch.zeros(0, device=self.device)

    def write(self, segments: Sequence[Segment], values: Tensor) -> None:
        parts = torch.split(values, [segment.numel for segment in segments])
        for view, part in zip(self._views(segments), parts, strict=True):
            view.copy_(part)


def find_masters(engine: Any) -> FlatMasters:
    """The masters of `engine`. UnsupportedError where this package does not know them."""
    for kind, make in _MAKERS.items():
        if isinstance(engine.optimizer, kind):
            return make(engine)
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return _without_zero(engine)
    raise UnsupportedError(
        f"/deepspeed_compress/islands does not know the masters of {type(engine.optimizer).__name__} (allowed: fp32 "
        'without ZeRO, ZeRO 1 to 3); write "zero_optimization": {"stage": 1}'
    )


def _of_buffers(engine: Any, held: Sequence[Tensor], groups: Sequence[Any], masters: Sequence[Tensor]) -> FlatMasters:
    """ZeRO 1 and 2 and the bf16 optimizer: each flat buffer is cut evenly, and `masters` are this rank's parts."""
    stretches: list[Stretch] = []
    for buffer, parameters, master, group in zip(
        held, groups, masters, engine.optimizer.real_dp_process_group, strict=True
    ):
        partition = even_partition(flat_sizes(buffer, parameters, engine.param_names), group.size())
        own = partition.owned_by(group.rank())
        first = own[0].offset if own else 0
        stretches += [
            Stretch(part.parameter, part.begin, master, part.offset - first, part.numel)
            for part in own
            if part.parameter != PADDING
        ]
    return FlatMasters(stretches, torch.device(engine.device), partial(_publish_buffers, engine), stretches)


def _publish_buffers(engine: Any) -> None:
    """Compressed weights have bookkeeping of their own; otherwise DeepSpeed gathers."""
    session = vars(engine).get("compression")
    if session is not None and session.exact is not None:
        session.renew_weights()
    else:
        engine.optimizer.update_lp_params()


def _zero_12(engine: Any) -> FlatMasters:
    own = engine.optimizer
    return _of_buffers(engine, own.bit16_groups_flat, own.bit16_groups, own.single_partition_of_fp32_groups)


def _bf16(engine: Any) -> FlatMasters:
    own = engine.optimizer
    return _of_buffers(engine, own.bf16_groups_flat, own.bf16_groups, own.fp32_groups_flat_partition)


def _zero_3(engine: Any) -> FlatMasters:
    optimizer, stretches = engine.optimizer, []
    if any(flat is None for flat in optimizer.fp16_partitioned_groups_flat):
        raise UnsupportedError(
            "/deepspeed_compress/islands: parameters on NVMe are not exchanged (allowed: on the device or in host "
            'memory); write "offload_param": {"device": "cpu"}'
        )
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()
            begin = size * parameter.ds_process_group.rank()
            numel = max(0, min(size, parameter.ds_numel - begin))
            if numel:
                stretches.append(Stretch(engine.param_names[parameter], begin, master, offset, numel))
            offset += size
    return FlatMasters(stretches, torch.device(engine.device), partial(_publish_partitions, optimizer), stretches)


def _publish_partitions(optimizer: Any) -> None:
    """As in DeepSpeed's `step` of ZeRO 3."""
    for number in range(len(optimizer.fp16_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        # What is there is not gathered again.
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _without_zero(engine: Any) -> FlatMasters:
    """Every rank has all masters: the parameters themselves. Each exchanges a part, and the island shares it."""
    group: ProcessGroup = engine.seq_data_parallel_group
    whole = {
        name: Stretch(name, 0, parameter, 0, parameter.numel())
        for parameter, name in engine.param_names.items()
        if parameter.requires_grad
    }
    partition = even_partition([(name, one.numel) for name, one in whole.items()], group.size())
    stretches = [
        whole[part.parameter].part(part.begin, part.begin + part.numel) for part in partition.owned_by(group.rank())
    ]
    publish = partial(_share_all, whole, partition, group)
    return FlatMasters(stretches, torch.device(engine.device), publish, list(whole.values()))


def _share_all(whole: Mapping[str, Stretch], partition: Any, group: ProcessGroup) -> None:
    """Every part of `whole` becomes that of its owner."""
    for owner in range(group.size() if group.size() > 1 else 0):
        parts = partition.owned_by(owner)
        views = [whole[part.parameter].values.narrow(0, part.begin, part.numel) for part in parts]
        if views:
            values = torch.cat(views)
            dist.broadcast(values, dist.get_global_rank(group, owner), group=group)
            for view, part in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
                view.copy_(part)


_MAKERS: Mapping[type, Callable[[Any], FlatMasters]] = MappingProxyType(
    {DeepSpeedZeroOptimizer: _zero_12, DeepSpeedZeroOptimizer_Stage3: _zero_3, BF16_Optimizer: _bf16}
)
