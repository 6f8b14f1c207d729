"""Backend for PyTorch's FSDP2 (`fully_shard`). `attach` is the entry point."""

from deepspeed_compress.backends.fsdp2.units import check_torch_of_fsdp2

try:
    from deepspeed_compress.backends.fsdp2.adapter import attach
    from deepspeed_compress.backends.sessions import Attached
except ImportError:
    check_torch_of_fsdp2()
    raise

__all__ = ["Attached", "attach"]
