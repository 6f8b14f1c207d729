"""Bytes that an operation of `bench kernels` reads and writes, counted in one call."""

from typing import Any

from torch import Tensor

from deepspeed_compress.compression.kernels.forms import ResidualBuffers

_ADDING = {"add", "sum"}
"""Words in the names of kernels that add to their last argument."""


class CountingKernels:
    """Kernels that record the bytes of the last call: `moved`.

    Every tensor among the arguments and results is counted once, and the target of an addition twice.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.moved = 0

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*args: Any, **keywords: Any) -> Any:
            result = kernel(*args, **keywords)
            given = (*args, *keywords.values(), result)
            self.moved = sum(map(_size, given)) + _size(_sum_of(name, args))
            return result

        return call


def _size(value: Any) -> int:
    if isinstance(value, ResidualBuffers):
        return value.before.nbytes + value.after.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 0


def _sum_of(name: str, args: tuple[Any, ...]) -> Any:
    """Return the tensor that the kernel both reads and writes, or None if it does not add to one."""
    last = [arg for arg in args if isinstance(arg, Tensor)][-1]
    return last if _ADDING & set(name.split("_")) else None
