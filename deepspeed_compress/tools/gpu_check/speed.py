"""Part 2: the speed of every kernel, relative to a device-to-device copy of the bytes that it reads and writes."""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.forms import ResidualBuffers
from deepspeed_compress.tools.bench.kernels import OPERATIONS, Kernels, Operation, seconds
from deepspeed_compress.tools.gpu_check.findings import Finding, Task

__all__ = ["bytes_moved", "findings"]

_NUMEL = {"cuda": 1 << 28, "cpu": 1 << 16}
"""Elements by device. On a GPU these are a gigabyte, much larger than its caches."""
_REPEATS = {"cuda": 15, "cpu": 3}
_NEEDED = 16
"""Maximum bytes of device memory per element."""
_GOAL, _GOAL_TOP_K = 0.8, 0.5
"""Goals as fractions of the speed of a copy."""
_ADDING = {"add", "sum"}
"""Words in the names of kernels that add to their last argument."""


def findings(task: Task) -> Iterator[Finding]:
    """Yield findings on the copy and on every operation of `bench kernels`."""
    numel, repeats = _numel(task), _REPEATS[task.device]
    x = torch.randn(numel, generator=torch.Generator(task.device).manual_seed(0), device=task.device)
    copy = 8 * numel / statistics.median(seconds(partial(torch.empty_like(x).copy_, x), x.device, repeats))
    yield Finding(
        f"copy of {4 * numel / 2**20:,.4g} MiB", _verdict(task, True), f"{1e-9 * copy:,.0f} GB/s", why=_why(task)
    )
    for operation in OPERATIONS:
        yield _measured(operation, x, copy, task, repeats)


def _numel(task: Task) -> int:
    """Return the number of elements, fewer if the device has too little memory."""
    if not task.on_gpu:
        return _NUMEL["cpu"]
    free, _ = torch.cuda.mem_get_info()
    return min(_NUMEL["cuda"], 1 << (free // _NEEDED).bit_length() - 1)


def _measured(operation: Operation, x: Tensor, copy: float, task: Task, repeats: int) -> Finding:
    kernels = for_device(x.device)
    moved = bytes_moved(operation, kernels, x)
    taken = statistics.median(seconds(operation.prepare(kernels, x), x.device, repeats))
    share, goal = moved / taken / copy, _GOAL_TOP_K if "top-k" in operation.name else _GOAL
    figure = f"{share:.0%} of copy, {1e3 * taken:.2f} ms, {1e-9 * moved / taken:,.0f} GB/s"
    return Finding(operation.name, _verdict(task, share >= goal), figure, f">= {goal:.0%} of copy", _why(task))


def _verdict(task: Task, reached: bool) -> Any:
    return "not run" if not task.on_gpu else "pass" if reached else "missed"


def _why(task: Task) -> str:
    return "" if task.on_gpu else "needs CUDA; the figure is of the CPU"


def bytes_moved(operation: Operation, kernels: Kernels, x: Tensor) -> int:
    """Return the bytes that `operation` reads and writes if it touches each tensor once, or twice if it adds to it."""
    counting = _Counting(kernels)
    operation.prepare(counting, x)()
    return counting.moved


class _Counting:
    """Kernels that record the sizes of the last call's arguments and results."""

    def __init__(self, kernels: Kernels) -> None:
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
