"""Backend for Megatron-core's data parallelism, whose bucket groups reduce compressed gradients.

    attach       attaches everything to the model chunks of a rank, follows its steps, and stores its state
    buckets      dense parameters and experts, and the layout and ownership of their buckets
    gradients    the seam for gradients: `start_grad_sync` of each bucket group
    weights      the seam for weights: `start_param_sync` of each bucket group
    activations  the seams for messages between stages, and for exchanges of experts
    limits       supported versions, and what is refused

Written for megatron-core 0.16.1.
"""

from deepspeed_compress.errors import install_command

try:
    import megatron.core  # noqa: F401  (whether it can be)
except ImportError as error:
    raise ImportError(f"megatron-core is not installed; write: {install_command('megatron')}") from error

from deepspeed_compress.backends.megatron.attach import Attached, attach

__all__ = ["Attached", "attach"]
