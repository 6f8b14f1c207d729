"""Recognition of process groups on gloo."""

import torch.distributed as dist
from torch.distributed import ProcessGroup


def is_gloo(group: ProcessGroup | None = None) -> bool:
    """Return True if `group`, or that of all ranks, uses gloo on every device.

    `torch.distributed.get_backend` does not tell: if the program names no backend, or one for each device, it returns
    "undefined", or a string such as "cpu:gloo".
    """
    pairs = dist.get_backend_config(group).split(",")
    return all(pair.endswith(":gloo") for pair in pairs)
