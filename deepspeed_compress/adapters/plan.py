"""Which gradients are sent together: batches that depend on the model alone.

An engine forms its buckets in the order in which gradients arrive, and DDP learns it in the first backward pass of a
process. Blocks, and with them bits, would differ when a run is resumed; so gradients are copied into batches of our
own, and these are sent in one order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.adapters.sessions import Target
from deepspeed_compress.communication.buckets import Partition, even_partition

__all__ = ["Batch", "Plan"]


@dataclass(frozen=True)
class Place:
    """Of a parameter: the number of its batch, and its first element there."""

    batch: int
    position: int


@dataclass
class Batch:
    """Gradients in one flat tensor: those that have come, with their positions, of a batch cut by `partition`.

    `missing`: elements that have not come yet.
    """

    partition: Partition
    flat: Tensor
    come: list[tuple[int, Tensor]] = field(default_factory=list)
    missing: int = 0

    def add(self, position: int, gradient: Tensor) -> None:
        """Copy `gradient` to its `position`."""
        self._part(position, gradient).copy_(gradient)
        self.come.append((position, gradient))
        self.missing -= gradient.numel()

    def hand_back(self) -> None:
        """Copy what is in `flat` now to where it has come from."""
        for position, gradient in self.come:
            gradient.copy_(self._part(position, gradient))

    def _part(self, position: int, gradient: Tensor) -> Tensor:
        return self.flat[position : position + gradient.numel()].view(gradient.shape)


@dataclass(frozen=True)
class Layout:
    """A batch before any gradient has come."""

    partition: Partition

    def opened(self, gradient: Tensor) -> Batch:
        """For gradients like `gradient`."""
        numel = self.partition.numel
        return Batch(self.partition, gradient.new_empty(numel), missing=numel)


class Plan:
    """Batches of about `size` bytes of the parameters of `target`, the last one first, as backward comes to them.

    Gradients of a batch have one type.
    """

    def __init__(self, target: Target, size: int) -> None:
        self.ranks = target.group.size()
        self.batches: list[Layout] = []
        self._places: dict[int, Place] = {}
        for batch in _divided(target, size):
            sizes = [(name, parameter.numel()) for name, parameter in batch]
            position = 0
            for _, parameter in batch:
                self._places[id(parameter)] = Place(len(self.batches), position)
                position += parameter.numel()
            self.batches.append(Layout(even_partition(sizes, self.ranks)))

    def place(self, parameter: Parameter) -> Place:
        return self._places[id(parameter)]


def _divided(target: Target, size: int) -> Iterator[Sequence[tuple[str, Parameter]]]:
    """(name, parameter) of each batch."""
    open_batches: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(list(target.parameters.items())):
        batch = open_batches.setdefault(parameter.dtype, [])
        batch.append((name, parameter))
        if sum(one.nbytes for _, one in batch) >= size:
            yield open_batches.pop(parameter.dtype)
    yield from open_batches.values()
