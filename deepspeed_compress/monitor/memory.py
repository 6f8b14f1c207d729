"""Peak memory of the process."""

import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory(device: "torch.device") -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
