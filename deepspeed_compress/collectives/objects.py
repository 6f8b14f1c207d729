"""Exchange of small Python objects between ranks."""

from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def gather_objects(one: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the object `one` of every rank of `group`, or of all ranks if it is None, in rank order. Collective."""
    found = [one] * dist.get_world_size(group)
    dist.all_gather_object(found, one, group=group)
    return found


def of_first(value: T, group: ProcessGroup | None = None) -> T:
    """Return the `value` of the first rank of `group`, or of the job if None. Collective, unless there is no job."""
    if not dist.is_initialized():
        return value
    found = [value]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]
