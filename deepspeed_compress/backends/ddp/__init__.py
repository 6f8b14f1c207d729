"""Backend for PyTorch's `DistributedDataParallel`.

    adapter   attaches the communication hook that reduces compressed gradients
    batches   assignment of gradients to batches that are sent together
    unused    parameters that no rank has used in a backward pass

`attach` is the entry point.
"""

from deepspeed_compress.backends.ddp.adapter import attach
from deepspeed_compress.backends.sessions import Attached

__all__ = ["Attached", "attach"]
