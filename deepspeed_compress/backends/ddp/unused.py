"""Handling of parameters that no rank has used in a backward pass (`find_unused_parameters`).

DDP leaves their gradients as they are and drops their reduced means. By then, error feedback has already sent their
residuals. The owner of each element therefore adds what the dropped mean contains beyond the gradient to its residual,
so that the next message contains it.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.backends.ddp.batches import Batch
from deepspeed_compress.backends.sessions import Target
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.session.session import Session


class Unused:
    """Tracker of the parameters of `target` that were used since the last reduction."""

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
        if segment.owner == self._group.rank():
            self._remember(mean.to(torch.float32) - gradient, segment)
        mean.copy_(gradient)

    def _remember(self, surplus: Tensor, segment: Segment) -> None:
        store = self._session.stores.get("gradients")
        if store is not None:
            # The mean is 1 / ranks times the sum, so the one owner must send all of it.
            kept = store.read([segment], surplus.device)
            store.write([segment], kept.add_(surplus, alpha=self._group.size()))


def _mark(used: Tensor, place: int, parameter: Tensor) -> None:
    used[place] = 1
