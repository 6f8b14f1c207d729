"""Deprecation warnings of other packages, which users cannot act on and which would hide progress lines."""

import sys
import warnings

_PACKAGES = r"(accelerate|deepspeed|torch|transformers)(\.|$)"
_ABOUT_THEMSELVES: tuple[tuple[str, type[Warning]], ...] = (
    (r".*is deprecated. Please use `torch\.distributed", FutureWarning),
    (r"c10d::broadcast_: an autograd kernel was not registered", UserWarning),
)
"""Warnings that Python attributes to the user's code, although they are about calls inside DeepSpeed."""


def hide_foreign_warnings() -> None:
    """Ignore deprecation warnings of other packages. Call this at the start of a program of this package.

    Nothing is hidden if the user asks for warnings: `PYTHONWARNINGS=default`, or `python -W default`.
    """
    if sys.warnoptions:
        return
    warnings.filterwarnings("ignore", category=FutureWarning, module=_PACKAGES)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=_PACKAGES)
    for message, category in _ABOUT_THEMSELVES:
        warnings.filterwarnings("ignore", message, category)
