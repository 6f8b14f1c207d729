"""Warnings of other packages about themselves, which a user of ours cannot change, and which drown progress lines."""

import sys
import warnings

__all__ = ["hide_foreign_warnings"]

_PACKAGES = r"(accelerate|deepspeed|torch|transformers)(\.|$)"
_ABOUT_THEMSELVES: tuple[tuple[str, type[Warning]], ...] = (
    (r".*is deprecated. Please use `torch\.distributed", FutureWarning),
    (r"c10d::broadcast_: an autograd kernel was not registered", UserWarning),
)
"""Warnings that are put down to the code of the user, but are about calls inside DeepSpeed."""


def hide_foreign_warnings() -> None:
    """Ignore what other packages say of their own future. Call it where a program of ours begins.

    Nothing is hidden if the user asks for warnings: `PYTHONWARNINGS=default`, or `python -W default`.
    """
    if sys.warnoptions:
        return
    warnings.filterwarnings("ignore", category=FutureWarning, module=_PACKAGES)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=_PACKAGES)
    for message, category in _ABOUT_THEMSELVES:
        warnings.filterwarnings("ignore", message, category)
