"""Handling of parameters that no rank has used in a backward pass (`find_unused_parameters`).

DDP leaves their gradients unchanged and drops their reduced means. By then, error feedback has already sent their
residuals. The owner of each element therefore adds the dropped mean to its residual, so that the next message contains
it.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.backends.sessions import Target
from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.compression.segments import Segment, gather
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
            mark = partial(_mark, self._used, place)
            handle = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            session.patches.on_undo(handle.remove)

    def take_back(self, buckets: Sequence[tuple[Tensor, Partition]]) -> None:
        """Add the means in `buckets` of parameters that no rank has used to the residuals.

        Collective. The host waits for it, as DDP's host does for its map of used parameters.
        """
        used = self._used.to(self._device, copy=True)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        self._used.zero_()
        flags: list[int] = used.tolist()
        for bucket, partition in buckets if not all(flags) else ():
            mine = partition.owned_by(self._group.rank())
            for segment in mine:
                if not flags[self._place[segment.parameter]]:
                    self._remember(gather(bucket, [segment]), segment)

    def _remember(self, mean: Tensor, segment: Segment) -> None:
        store = self._session.stores.get("gradients")
        if store is not None:
            # The mean is 1 / ranks times the sum, so the one owner must send all of it.
            kept = store.read([segment], mean.device)
            store.write([segment], kept.add_(mean, alpha=self._group.size()))


def _mark(used: Tensor, place: int, parameter: Tensor) -> None:
    used[place] = 1
