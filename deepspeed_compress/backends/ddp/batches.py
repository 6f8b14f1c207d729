"""Gradients in batches that are sent together and depend only on the model, and those of parameters that are not used.

An engine forms its buckets in the order in which gradients arrive, which DDP learns in the first backward pass of a
process. Blocks, and therefore bits, would differ after resuming a run. Gradients are therefore copied into separate
batches, which are sent in a fixed order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.backends.sessions import Target
from deepspeed_compress.collectives.buckets import Partition, even_partition
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.session.session import Session


@dataclass
class Batch:
    """Gradients of a batch, cut by `partition`, in one flat tensor.

    Attributes:
        partition: partition of the batch.
        flat: the tensor.
        come: the gradients that have arrived, with their positions.
        missing: number of elements that have not arrived yet.
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

    def arrived(self, segment: Segment) -> Tensor:
        """Return the gradients of `segment` as they have arrived; called before `hand_back`."""
        found = ((p, gradient) for p, gradient in self.come if p <= segment.offset < p + gradient.numel())
        position, gradient = next(found)
        return gradient.flatten().narrow(0, segment.offset - position, segment.numel)

    def hand_back(self) -> None:
        """Copy the parts of `flat` back to the gradients that they came from."""
        for position, gradient in self.come:
            gradient.copy_(self._part(position, gradient))

    def _part(self, position: int, gradient: Tensor) -> Tensor:
        return self.flat[position : position + gradient.numel()].view(gradient.shape)


class Plan:
    """Batches of about `size` bytes of the parameters of `target`, last parameter first, as in backward.

    All gradients of a batch have the same dtype.
    """

    def __init__(self, target: Target, size: int) -> None:
        self.ranks = target.group.size()
        self.batches: list[Partition] = []
        self.places: dict[int, tuple[int, int]] = {}
        """Place of each parameter, by its id: the number of its batch, and its first element there."""
        for batch in _divided(target, size):
            sizes = [(name, parameter.numel()) for name, parameter in batch]
            position = 0
            for _, parameter in batch:
                self.places[id(parameter)] = (len(self.batches), position)
                position += parameter.numel()
            self.batches.append(even_partition(sizes, self.ranks))


def _divided(target: Target, size: int) -> Iterator[Sequence[tuple[str, Parameter]]]:
    """Yield the (name, parameter) pairs of each batch."""
    open_batches: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(list(target.parameters.items())):
        batch = open_batches.setdefault(parameter.dtype, [])
        batch.append((name, parameter))
        if sum(one.nbytes for _, one in batch) >= size:
            yield open_batches.pop(parameter.dtype)
    yield from open_batches.values()


class Unused:
    """Tracker of the parameters of `target` that were used since the last reduction (`find_unused_parameters`).

    DDP leaves the gradients of parameters that no rank has used as they are, and drops their reduced means. By then,
    error feedback has already sent their residuals. The owner of each element therefore adds what the dropped mean
    contains beyond the gradient to its residual, so that the next message contains it.
    """

    def __init__(self, session: Session, target: Target) -> None:
        self._session = session
        self._group = target.group
        self._place = {name: place for place, name in enumerate(target.parameters)}
        self._used = torch.zeros(len(self._place), dtype=torch.uint8)
        self._device = target.device
        for place, parameter in enumerate(target.parameters.values()):
            mark, is_trained = partial(_mark, self._used, place), parameter.requires_grad
            # torch refuses a hook on a frozen parameter, which may be trained later. Its method has no annotations.
            handle = parameter.requires_grad_().register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)
            session.patches.on_undo(handle.remove)

    def take_back(self, batches: Sequence[Batch]) -> None:
        """Undo the reduction of parameters that no rank has used, before `batches` are handed back.

        Collective. The host waits for it, as DDP's host does for its map of used parameters.
        """
        used = self._used.to(self._device, copy=True)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        self._used.zero_()
        flags: list[int] = used.tolist()
        for batch in batches if not all(flags) else ():
            for segment in batch.partition.segments:
                if not flags[self._place[segment.parameter]]:
                    self._undo(batch, segment)

    def _undo(self, batch: Batch, segment: Segment) -> None:
        # Not zero if an earlier backward pass of the step has reduced it, so it is equal on all ranks.
        mean, gradient = batch.flat.narrow(0, segment.offset, segment.numel), batch.arrived(segment)
        store = self._session.residuals.by_name.get("gradients")
        if store is not None and segment.owner == self._group.rank():
            # The mean is 1 / ranks times the sum, so the one owner must send all of it.
            surplus, kept = mean.to(torch.float32) - gradient, store.read([segment], mean.device)
            store.write([segment], kept.add_(surplus, alpha=self._group.size()))
        mean.copy_(gradient)


def _mark(used: Tensor, place: int, parameter: Tensor) -> None:
    used[place] = 1
