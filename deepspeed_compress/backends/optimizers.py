"""Unwrapping of optimizers that wrap a torch optimizer, whose steps can be followed."""

from typing import Any

from torch.optim import Optimizer

from deepspeed_compress.errors import UnsupportedError

_INSIDE = ("optimizer", "optim")
"""Attributes in which wrappers keep it: Accelerate's `AcceleratedOptimizer`, torch's `PostLocalSGDOptimizer`."""


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer that `optimizer` is, or that it wraps.

    Raises:
        UnsupportedError: there is none.
    """
    found: Optimizer | None = optimizer
    while found is not None and not _can_be_followed(found):
        inside = (getattr(found, name, None) for name in _INSIDE)
        found = next((one for one in inside if isinstance(one, Optimizer)), None)
    if found is None:
        raise UnsupportedError(
            f"optimizer: expected a torch optimizer, or a wrapper with one in its attribute `optimizer`, got "
            f"{type(optimizer).__name__}; pass the torch optimizer that updates the parameters"
        )
    return found


def _can_be_followed(optimizer: Any) -> bool:
    """Return True for a torch optimizer whose constructor was called, unlike that of wrappers, which are subclasses."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)
