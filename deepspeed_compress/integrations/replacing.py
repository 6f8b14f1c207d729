"""Reversible wrapping of a method of another library's class, or of a function of its module."""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepspeed_compress.errors import CompressWarning, SeamError
from deepspeed_compress.session.patches import Patches

_OURS = "_compress_original"


def is_replaced(owner: type | ModuleType, name: str) -> bool:
    """Return True if `replace_method` has wrapped the method and that has not been undone."""
    return hasattr(getattr(owner, name), _OURS)


def replace_method(
    owner: type | ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace the method `name` of `owner` by `wrap(method)`, which keeps its signature.

    If the method is already replaced, nothing changes.

    Returns:
        A function that undoes the replacement.
    """
    original = getattr(owner, name)
    if is_replaced(owner, name):
        return lambda: None
    wrapper = functools.wraps(original)(wrap(original))
    setattr(wrapper, _OURS, original)
    patches = Patches()
    patches.replace(owner, name, wrapper)

    def undo() -> None:
        try:
            patches.undo()
        except SeamError:
            text = f"{owner.__name__}.{name}: other code has replaced it since install(), so it is left as it is"
            warnings.warn(text, CompressWarning, stacklevel=2)

    return undo
