"""Reductions of ZeRO 1 and 2 that finish after the last bucket is closed, on devices without streams."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.backends.deepspeed.gradients.muon import SplitMatrices
from deepspeed_compress.backends.deepspeed.versions import has_compact_gradients, may_defer_reductions
from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.compression.segments import Segment


def may_wait(optimizer: Any) -> bool:
    """Return True if reductions can be deferred until the last bucket is closed.

    They can if DeepSpeed reads no reduced bucket before that, and if the device has no streams to overlap them with.
    """
    if not may_defer_reductions() or has_compact_gradients(optimizer):
        return False
    on_host = all(flat.device.type == "cpu" for flat in optimizer.bit16_groups_flat)
    return on_host and optimizer.contiguous_gradients and not optimizer.cpu_offload


class DeferredReductions:
    """Pending reductions, and a replacement for DeepSpeed's `reduce_ipg_grads` that finishes them."""

    def __init__(self, optimizer: Any, split: SplitMatrices) -> None:
        self.pending: list[tuple[Partition, Pending]] = []
        self._optimizer = optimizer
        self._split = split
        self._parameters = {name: parameter for parameter, name in optimizer.param_names.items()}
        self._original = optimizer.reduce_ipg_grads

    def add(self, partition: Partition, pending: Pending) -> None:
        """Keep a reduction of a bucket with these owners for `reduce_ipg_grads`."""
        self.pending.append((partition, pending))

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Call DeepSpeed's `reduce_ipg_grads`; in the call for all dtypes, then finish the pending reductions."""
        self._original(comm_dtype=comm_dtype)
        if comm_dtype is None:
            reduced = self.taken()
            for _, pending in reduced:
                self._land(pending)
            for partition, _ in reduced:
                self._split.complete(partition, self._gradient)

    def taken(self) -> list[tuple[Partition, Pending]]:
        """Return the pending reductions and forget them; the caller must finish them."""
        pending, self.pending = self.pending, []
        return pending

    def _land(self, pending: Pending) -> None:
        """Finish a reduction, and write the means over this rank's local gradients.

        DeepSpeed has already moved the unreduced gradients of this rank's parameters out of the bucket.
        """
        if not pending.own:
            pending.finish(torch.zeros(0))
            return
        places = [self._gradient(segment) for segment in pending.own]
        sums = pending.finish(torch.cat(places).to(torch.float32))
        for place, part in zip(places, torch.split(sums, [place.numel() for place in places]), strict=True):
            place.copy_(part)

    def _gradient(self, segment: Segment) -> Tensor:
        gradient: Tensor = self._optimizer.get_gradient_for_reduction(self._parameters[segment.parameter])
        return gradient.view(-1)[segment.begin : segment.begin + segment.numel]
