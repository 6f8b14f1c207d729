"""Reductions that a failed backward pass has begun and never finished."""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.errors import StateError


def discard(pending: Sequence[Pending], group: ProcessGroup) -> None:
    """Wait for reductions whose sums are not needed any more, so that no later message is mistaken for one of theirs.

    Collective.

    Raises:
        StateError: on all ranks of `group`, if they have begun different numbers of reductions.
    """
    begun = gather_objects(len(pending), group)
    if min(begun) != max(begun):
        raise StateError(
            f"backward failed at different points: ranks have started {begun} reductions, so some ranks wait "
            "for others that never started theirs (allowed: the same number on all ranks); restart the job"
        )
    for one in pending:
        one.finish(torch.zeros(sum(segment.numel for segment in one.own)))
