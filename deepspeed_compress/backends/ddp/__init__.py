"""Backend for PyTorch's `DistributedDataParallel`. `attach` is the entry point."""

from deepspeed_compress.backends.ddp.adapter import attach
from deepspeed_compress.backends.sessions import Attached

__all__ = ["Attached", "attach"]
