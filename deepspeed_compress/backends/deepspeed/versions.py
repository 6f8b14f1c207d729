"""Adapters for what differs between the supported versions of DeepSpeed: one function for each difference.

Signatures that differ are listed in `seams`.
"""

from typing import Any

import deepspeed
from packaging.version import Version

__all__ = [
    "averages_gradients",
    "closes_last_bucket_visibly",
    "has_compact_gradients",
    "knows_running_backward",
    "model_parallel_rank",
    "owns_parameter",
    "skips_invalid_norms",
]


def _since(first: str) -> bool:
    """Return True if the installed DeepSpeed is `first` or newer. Previews and local builds count as their release."""
    return Version(deepspeed.__version__).release >= Version(first).release


def averages_gradients(owner: Any) -> bool:
    """Return True if `owner`, an engine or a ZeRO optimizer, averages gradients instead of adding them.

    Before `gradient_allreduce_op` (0.19.6), DeepSpeed always averages.
    """
    return bool(owner.gradient_average) if _since("0.19.6") else True


def closes_last_bucket_visibly() -> bool:
    """Return True if the call of `reduce_ipg_grads` for the last bucket differs from the others, as since 0.18.5."""
    return _since("0.18.5")


def has_compact_gradients(optimizer: Any) -> bool:
    """Return True if a ZeRO 2 optimizer keeps only this rank's partition of some group's gradients (since 0.19.8)."""
    return _since("0.19.8") and any(
        optimizer._use_compact_grad_partition_buffer(group) for group in range(len(optimizer.bit16_groups))
    )


def knows_running_backward() -> bool:
    """Return True if engines record that their `backward` is running, as since 0.18.3."""
    return _since("0.18.3")


def model_parallel_rank(engine: Any) -> int:
    """Return the tensor-parallel rank in the names of checkpoint files (`checkpoint_mp_rank` since 0.19.6)."""
    if _since("0.19.6"):
        return int(engine.checkpoint_mp_rank)
    return 0 if engine.mpu is None else int(engine.mpu.get_model_parallel_rank())


def owns_parameter(parameter: Any) -> bool:
    """Return True if DeepSpeed's optimizers own `parameter` (`is_optimized_parameter`).

    Since 0.19.8, they leave out parameters without elements.
    """
    return bool(parameter.requires_grad) and (parameter.numel() > 0 or not _since("0.19.8"))


def skips_invalid_norms() -> bool:
    """Return True if DeepSpeed's own optimizers skip a step whose gradient norm is not finite, as since 0.19.8."""
    return _since("0.19.8")
