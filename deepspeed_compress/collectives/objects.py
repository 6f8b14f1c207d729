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
