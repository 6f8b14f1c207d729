"""Triton kernels on machines without a GPU: interpreted, or only compiled, each in a process of its own."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

Runner = Callable[..., Any]
"""`run(work, *args)` returns `work(*args)`, or raises what it raised. All must be picklable."""


@contextmanager
def process_with(environment: dict[str, str]) -> Iterator[Runner]:
    """A process that does not have the modules of this one; Triton reads `environment` when it is imported."""
    before = {name: os.environ.get(name) for name in environment}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        os.environ |= environment
        try:
            pool.submit(int).result()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        yield lambda work, *args: pool.submit(work, *args).result()


@contextmanager
def gpu_or_interpreter() -> Iterator[Runner]:
    """`run(work, *args)` returns `work(device, *args)`: on the GPU if there is one, else interpreted on CPU."""
    if torch.cuda.is_available():
        yield lambda work, *args: work(torch.device("cuda"), *args)
        return
    with process_with({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}) as run:
        yield lambda work, *args: run(work, torch.device("cpu"), *args)


class _NoDriver:
    """What Triton asks of a driver in order to compile: the GPU to compile for, in place of one that is there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def ptx_of(work: Callable[[], None], capability: int) -> list[tuple[str, str]]:
    """(name, PTX) of the kernels that `work` starts with CPU tensors: compiled for `capability`, not run.

    To be called in a process of `process_with`, where kernels are not interpreted.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoDriver(capability))
    compiled, start = [], JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        compiled.append(start(kernel, *args, **options | {"warmup": True}))

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = start
    return [(kernel.metadata.name, kernel.asm["ptx"]) for kernel in compiled]


def inexact(ptx: str) -> set[str]:
    """The instructions of `ptx` whose results are not those of IEEE 754, one rounding an operation."""
    return set(re.findall(r"\b[a-z]\w*\S*\.(?:ftz|approx|full)\S*|\bfma\.\S*|\b(?:div|sqrt)\.r[zmp]\S*", ptx))
