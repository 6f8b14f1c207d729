"""Optimizers that wrap another one: the optimizer of torch, whose steps can be followed, is inside."""

from typing import Any

from torch.optim import Optimizer

from deepspeed_compress.errors import UnsupportedError

__all__ = ["unwrap"]

_INSIDE = ("optimizer", "optim")
"""Attributes under which wrappers keep it: `AcceleratedOptimizer` of Accelerate, `PostLocalSGDOptimizer` of torch."""


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of torch that `optimizer` is, or that it calls.

    Raises UnsupportedError for anything else.
    """
    found: Optimizer | None = optimizer
    while found is not None and not _can_be_followed(found):
        inside = (getattr(found, name, None) for name in _INSIDE)
        found = next((one for one in inside if isinstance(one, Optimizer)), None)
    if found is None:
        raise UnsupportedError(
            f"optimizer: steps of a {type(optimizer).__name__} cannot be followed (allowed: an optimizer of torch, or "
            "a wrapper that keeps one as its attribute `optimizer`); pass the optimizer of torch that steps the "
            "parameters"
        )
    return found


def _can_be_followed(optimizer: Any) -> bool:
    """Return True for an optimizer of torch whose constructor was called: wrappers are subclasses that do not."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)
