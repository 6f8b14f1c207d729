"""Adapters for what differs between the supported versions of DeepSpeed: one function for each difference.

Signatures that differ are listed in `seams`.
"""

from typing import Any

import deepspeed
from packaging.version import Version


def _since(first: str) -> bool:
    """Return True if the installed DeepSpeed is `first` or newer. Previews and local builds count as their release."""
    return Version(deepspeed.__version__).release >= Version(first).release


def has_compact_gradients(optimizer: Any) -> bool:
    """Return True if a ZeRO 2 optimizer keeps only this rank's partition of some group's gradients (since 0.19.8)."""
    return _since("0.19.8") and any(
        optimizer._use_compact_grad_partition_buffer(group) for group in range(len(optimizer.bit16_groups))
    )


def orthogonalizes_in_step() -> bool:
    """Return True if Muon orthogonalizes the reduced gradients of a whole step, under each ZeRO stage, as since 0.19.8.

    Before, it does so while ZeRO 3 reduces a bucket, and a skipped step changes its momentum.
    """
    return _since("0.19.8")


def owns_parameter(parameter: Any) -> bool:
    """Return True if DeepSpeed's optimizers own `parameter` (`is_optimized_parameter`).

    Since 0.19.8, they leave out parameters without elements.
    """
    return bool(parameter.requires_grad) and (parameter.numel() > 0 or not _since("0.19.8"))


def reduces_separate_gradients() -> bool:
    """Return True if buckets of separate tensors can be reduced with the results of DeepSpeed, as since 0.19.8.

    Before, DeepSpeed's own results without `contiguous_gradients` under ZeRO 1 and 2 are different from those with it.
    """
    return _since("0.19.8")


def skips_invalid_norms() -> bool:
    """Return True if DeepSpeed's own optimizers skip a step whose gradient norm is not finite, as since 0.19.8."""
    return _since("0.19.8")
