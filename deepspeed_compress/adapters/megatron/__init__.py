"""Megatron-core's data parallelism: its bucket groups reduce compressed gradients.

    attach       all that is attached to the model chunks of a rank
    buckets      what lies where in its buckets, and who owns what
    gradients    the seam: `start_grad_sync` of each bucket group
    weights      the other seam: `start_param_sync` of each bucket group
    shares       dense parameters and experts, each with a group of its own
    steps        how the steps of its optimizer end
    checkpoints  what is remembered, in checkpoints of its own
    limits       versions, and what is refused

Read from megatron-core 0.16.1.
"""

try:
    import megatron.core  # noqa: F401  (whether it can be)
except ImportError as error:
    raise ImportError(
        "deepspeed_compress.megatron needs megatron-core, which this environment does not have; write: pip install "
        '"deepspeed-compress[megatron]"'
    ) from error

from deepspeed_compress.adapters.megatron.attach import Attached, attach

__all__ = ["Attached", "attach"]
