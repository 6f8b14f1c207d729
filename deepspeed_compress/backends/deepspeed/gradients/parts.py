"""Contents of the buckets of ZeRO 1 and 2: parameters that the same ranks reduce, and which of them owns which slice.

`Zero1Gradients` are those of an engine with ZeRO 1, whose reductions begin before DeepSpeed asks for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.backends.deepspeed.gradients.early import reduces_now
from deepspeed_compress.backends.deepspeed.versions import is_last_micro_batch
from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, partition_by_sizes
from deepspeed_compress.compression.segments import Segment, gather
from deepspeed_compress.monitor import ring_all_reduce

Key = tuple[int, int, int]
"""Identity of a parameter in DeepSpeed's bucket: (optimizer group, index in the group, parameter id)."""


@dataclass(frozen=True)
class Part:
    """The parameters of a bucket that the same ranks reduce: all of them, or experts and others separately.

    Attributes:
        keys: the parameters, in the order of the bucket.
        places: the place of each parameter in the bucket.
        partition: the owners of the part's elements.
    """

    keys: tuple[Key, ...]
    places: tuple[Segment, ...]
    partition: Partition

    def of(self, bucket: Tensor) -> Tensor:
        """Return the elements of this part: `bucket` itself if it has no other part, else a copy in fp32."""
        return bucket if self.partition.numel == bucket.numel() else gather(bucket, self.places)

    def all_reduced(self, dtype: torch.dtype) -> int:
        """Return the bytes that this rank sends if DeepSpeed all-reduces this part in `dtype`."""
        return ring_all_reduce(self.partition.numel * dtype.itemsize, self.partition.world_size)


def parts_of(optimizer: Any) -> Callable[[tuple[Key, ...]], list[Part]]:
    """Return a function that returns the parts of a bucket."""
    return lru_cache(maxsize=LAYOUTS)(partial(_parts, optimizer))


def _parts(optimizer: Any, keys: tuple[Key, ...]) -> list[Part]:
    """Return the parts of the bucket `keys`, in the order of their first parameters."""
    found: dict[Any, list[tuple[Key, Segment]]] = {}
    offset = 0
    for key in keys:
        parameter = optimizer.bit16_groups[key[0]][key[1]]
        place = Segment(optimizer.param_names[parameter], 0, parameter.numel(), offset, 0)
        found.setdefault(optimizer.real_dp_process_group[key[0]], []).append((key, place))
        offset += place.numel
    parts = []
    for group, entries in found.items():
        members, places = zip(*entries, strict=True)
        parts.append(Part(members, places, _partition(optimizer, group.size(), members)))
    return parts


def _partition(optimizer: Any, ranks: int, keys: tuple[Key, ...]) -> Partition:
    """Return the owner of each slice of a bucket, from DeepSpeed's tables (`initialize_gradient_partition`)."""
    parts = []
    for group, index, parameter_id in keys:
        parameter = optimizer.bit16_groups[group][index]
        starts = optimizer.grad_start_offset[group]
        owners = sorted(optimizer.param_to_partition_ids[group][parameter_id], key=lambda p: starts[p][parameter_id])
        # Before 0.19.7, DeepSpeed divides with `/`, so its offsets are whole numbers of type float.
        begins = [int(starts[owner][parameter_id]) for owner in owners]
        ends = [*begins[1:], parameter.numel()]
        sizes = [(owner, end - begin) for owner, begin, end in zip(owners, begins, ends, strict=True)]
        parts.append((optimizer.param_names[parameter], sizes))
    return partition_by_sizes(parts, ranks)


class Zero1Gradients:
    """Gradients of an engine with ZeRO 1; see `Gradients`."""

    everywhere = False

    def __init__(self, engine: Any, scale: float) -> None:
        self.group = self.asking = engine.optimizer.dp_process_group
        self.scale = scale
        self.device = torch.device(engine.device)
        self.partition = lru_cache(maxsize=LAYOUTS)(partial(_partition, engine.optimizer, self.group.size()))
        self.side_by_side = lru_cache(maxsize=LAYOUTS)(self._side_by_side)
        self._engine = engine
        self._optimizer = engine.optimizer

    def _parameters(self) -> Iterator[tuple[Key, Any]]:
        for number, group in enumerate(self._optimizer.bit16_groups):
            for parameter in group:
                yield (number, parameter.param_idx_in_group, self._optimizer.get_param_id(parameter)), parameter

    def hooked(self) -> Iterator[tuple[Any, Key]]:
        return ((parameter, key) for key, parameter in self._parameters() if parameter.requires_grad)

    def of(self, key: Key) -> Tensor:
        parameter = self._optimizer.bit16_groups[key[0]][key[1]]
        gradient: Tensor | None = self._optimizer.get_gradient_for_reduction(parameter)
        return torch.zeros_like(parameter).reshape(-1) if gradient is None else gradient.reshape(-1)

    def due(self) -> Iterator[Key]:
        for key, parameter in self._parameters():
            if parameter.numel() and self._optimizer.get_gradient_for_reduction(parameter) is not None:
                yield key

    def _side_by_side(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        """Return `keys` sorted by the first owner of each parameter.

        Returns them unchanged if sorting would move a parameter with two owners within the message to the second one.
        """
        names = {key: self._optimizer.param_names[self._optimizer.bit16_groups[key[0]][key[1]]] for key in keys}
        owners = {part.parameter: part.owner for part in reversed(self.partition(keys).segments)}
        ordered = tuple(sorted(keys, key=lambda key: owners.get(names[key], 0)))
        return ordered if _messages(self.partition(ordered)) == _messages(self.partition(keys)) else keys

    def complete_now(self) -> bool:
        return reduces_now(self._engine) and is_last_micro_batch(self._optimizer)


def _messages(partition: Partition) -> list[list[tuple[str, int]]]:
    """Return (parameter, first element) of each segment that each owner receives, in order."""
    ranks = range(partition.world_size)
    return [[(part.parameter, part.begin) for part in partition.owned_by(rank)] for rank in ranks]
