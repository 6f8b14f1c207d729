"""Operations of an implementation of the kernels."""

import inspect
from types import ModuleType

from deepspeed_compress.compression import kernels

_HELPERS = ("arguments", "compiled", "gpu_launch")


def operations(module: ModuleType) -> set[str]:
    """Return the names of the public functions of an implementation, without those of its helpers."""
    found = [(name, one.__module__) for name, one in inspect.getmembers(module, inspect.isfunction) if name[0] != "_"]
    ours = [(name, place.removeprefix(f"{kernels.__name__}.")) for name, place in found if "kernels." in place]
    return {name for name, place in ours if place not in _HELPERS}
