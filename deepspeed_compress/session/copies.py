"""Copies and pickles of objects that leave out what this package attached to them.

Programs copy models to average their weights, and save whole models and scalers. The attached hooks hold process
groups, which cannot be copied; and the copy is another object, to which nothing is attached yet.
"""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_REDUCE = "__reduce_ex__"


def leave_out_of_copies(owner: Any) -> None:
    """Make `copy.deepcopy` and pickles of `owner` leave out hooks, methods and attributes of this package."""
    # Both look up `__reduce_ex__` on the object itself. The reference is weak, so that the object can be freed.
    object.__setattr__(owner, _REDUCE, partial(_reduce, weakref.ref(owner)))


def _reduce(reference: "weakref.ref[Any]", protocol: Any) -> tuple[Any, ...]:
    owner = reference()
    made, arguments, state, *rest = getattr(type(owner), _REDUCE)(owner, protocol)
    cleaned = {name: _without_ours(value) for name, value in state.items() if name != _REDUCE and not _is_ours(value)}
    return (made, arguments, cleaned, *rest)


def _without_ours(value: Any) -> Any:
    """Return `value` without the hooks of this package that it holds."""
    if isinstance(value, dict) and any(map(_is_ours, value.values())):
        return type(value)((key, hook) for key, hook in value.items() if not _is_ours(hook))
    if isinstance(value, list):
        # Communication hooks of DistributedDataParallel, each with its state.
        return [one for one in value if not (isinstance(one, tuple) and any(map(_is_ours, one)))]
    return value


def _is_ours(value: Any) -> bool:
    while isinstance(value, partial):
        value = value.func
    owner = getattr(value, "__self__", value)
    return not isinstance(owner, Mapping) and str(getattr(owner, "__module__", "")).partition(".")[0] == _PACKAGE
