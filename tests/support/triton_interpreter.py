"""Triton kernels on machines without a GPU: interpreted or only compiled, in a separate process."""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

Runner = Callable[..., Any]
"""Function `run(work, *args)` that returns `work(*args)`, or raises its error. All arguments must be picklable."""


@contextmanager
def process_with(environment: dict[str, str]) -> Iterator[Runner]:
    """Start a process with `environment`, which Triton reads when it is imported. It inherits no modules."""
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
    """Yield `run(work, *args)`: it returns `work(device, *args)`, on the GPU if there is one, else interpreted."""
    if torch.cuda.is_available():
        yield lambda work, *args: work(torch.device("cuda"), *args)
        return
    with process_with({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}) as run:
        yield lambda work, *args: run(work, torch.device("cpu"), *args)


class _NoDriver:
    """Driver that names the GPU to compile for, in place of an existing one."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled Triton program.

    Attributes:
        name: name of the kernel.
        ptx: PTX code.
        cubin: output of `ptxas`.
        warps: warps per program.
        shared: bytes of shared memory per program.
    """

    name: str
    ptx: str
    cubin: bytes
    warps: int
    shared: int

    @cached_property
    def sass(self) -> str:
        """Return the machine code."""
        return _tool("nvdisasm", "--print-code", self.cubin)

    @cached_property
    def registers(self) -> int:
        """Return the number of registers per thread."""
        found = re.search(r"REG:(\d+)", _tool("cuobjdump", "--dump-resource-usage", self.cubin))
        assert found is not None
        return int(found[1])

    @property
    def uses_local_memory(self) -> bool:
        """Return True if registers are spilled, or arrays are stored outside registers."""
        return re.search(r"\b(LDL|STL)\b", self.sass) is not None

    @property
    def warps_at_once(self) -> int:
        """Return how many of the 64 warps of a multiprocessor (capability 8.0 or 9.0) this program can use.

        A multiprocessor has 65536 registers, in units of 8 per thread, 164 KB of shared memory, of which each program
        needs an additional 1 KB, and at most 32 programs.
        """
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return self.warps * min(by_registers, (164 << 10) // (self.shared + 1024), 32, 64 // self.warps)

    def accesses(self, operation: str, bits: int) -> bool:
        """Return True if there is an `operation` (LDG or STG) of `bits` bits per thread."""
        return re.search(rf"\b{operation}\.E\.{bits}\b", self.sass) is not None


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Return the output of a program of Triton's distribution for `cubin`."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], check=True, capture_output=True, text=True).stdout


def compiled(work: Callable[[], None], capability: int) -> list[CompiledKernel]:
    """Return the kernels that `work` launches with CPU tensors, compiled for `capability` but not run.

    Must be called in a process of `process_with` in which kernels are not interpreted.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoDriver(capability))
    kernels, start = [], JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        kernels.append(start(kernel, *args, **options | {"warmup": True}))

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = start
    return [
        CompiledKernel(one.metadata.name, one.asm["ptx"], one.asm["cubin"], one.metadata.num_warps, one.metadata.shared)
        for one in kernels
    ]


def inexact(ptx: str) -> set[str]:
    """Return the instructions of `ptx` that do not round every operation as IEEE 754 requires."""
    return set(re.findall(r"\b[a-z]\w*\S*\.(?:ftz|approx|full)\S*|\bfma\.\S*|\b(?:div|sqrt)\.r[zmp]\S*", ptx))
