"""Gradients of an engine with ZeRO 1, whose reductions begin before DeepSpeed asks for them."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.backends.deepspeed.gradients.early import reduces_now
from deepspeed_compress.backends.deepspeed.gradients.parts import Key
from deepspeed_compress.backends.deepspeed.versions import is_last_micro_batch
from deepspeed_compress.collectives.buckets import LAYOUTS, Partition


class Zero1Gradients:
    """Gradients of an engine with ZeRO 1; see `Gradients`."""

    everywhere = False

    def __init__(self, engine: Any, partition_of: Callable[[tuple[Key, ...]], Partition], scale: float) -> None:
        self.group = self.asking = engine.optimizer.dp_process_group
        self.scale = scale
        self.device = torch.device(engine.device)
        self.partition = partition_of
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
