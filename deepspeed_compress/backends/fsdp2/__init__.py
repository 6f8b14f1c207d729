"""Backend for PyTorch's FSDP2 (`fully_shard`).

    adapter     attaches the reduction of gradients and the gathers of weights
    units       the sharded parameters of a model
    layout      ownership of the elements of the buffers that are reduced
    gradients   the reduction of gradients
    weights     the gathers of weights
    limits      what is refused, and why

`attach` is the entry point.
"""

from deepspeed_compress.backends.fsdp2.units import check_torch_of_fsdp2

try:
    from deepspeed_compress.backends.fsdp2.adapter import attach
    from deepspeed_compress.backends.sessions import Attached
except ImportError:
    check_torch_of_fsdp2()
    raise

__all__ = ["Attached", "attach"]
