"""The machine code of the Triton kernels, compiled without a GPU: no spills, wide loads, and enough warps at once.

The warps for capability 9.0 are those of the table in docs/kernels.md.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch

from deepspeed_compress.compression.kernels.arguments import FIRST, BlockFormat, Keys, MessageTable, ResidualBuffers
from tests.support.kernels import message_of
from tests.support.triton_interpreter import CompiledKernel, Runner, compiled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.sampled(36),
]

FORMS = {
    "int8": BlockFormat("absmax", 127, 8, 256),
    "int4": BlockFormat("absmax", 7, 4, 256),
    "norm": BlockFormat("norm", 7, 4, 256),
    "sign": BlockFormat("mean", 1, 1, 256),
    "four levels": BlockFormat("lloyd", 4, 2, 256),
    "eight levels": BlockFormat("eight", 10, 3, 256),
}
NUMEL = 100_001
"""An odd number, so that only the last program may load fewer bytes at once."""


def _message(form: BlockFormat) -> tuple[MessageTable, torch.Tensor]:
    table, out, _ = message_of(form, NUMEL, torch.zeros(-(-NUMEL // form.block_size)))
    return table, out


def encode(name: str, key: int | None = None) -> None:
    from deepspeed_compress.compression.kernels import gpu

    values, keys = torch.zeros(NUMEL, dtype=torch.bfloat16), None if key is None else Keys.of_single(key)
    (table, out), residual = _message(FORMS[name]), ResidualBuffers(values, 0.9, values)
    gpu.quantize_messages(torch.zeros(NUMEL), FIRST, FORMS[name], out, table, keys, residual)


def decode(name: str, ranks: int) -> None:
    from deepspeed_compress.compression.kernels import gpu

    table, out = _message(FORMS[name])
    payloads, total = out.repeat(ranks, 1), torch.zeros(NUMEL)
    gpu.dequantize_messages(payloads, FORMS[name], table, total, FIRST, 0.5, True)


def top_k(rows: int, width: int) -> None:
    from deepspeed_compress.compression.kernels import gpu

    gpu.top_k_rows(torch.zeros(rows, width), width // 100)


def transform(name: str, height: int) -> None:
    from deepspeed_compress.compression.kernels import gpu

    tiles = torch.zeros(3, 1, height, height)
    getattr(gpu, name)(tiles, torch.zeros_like(tiles), False)


def numbers() -> None:
    from deepspeed_compress.compression.kernels import gpu

    x, half = torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=torch.bfloat16)
    gpu.uniform(NUMEL, 1, x.device)
    gpu.cast(x, half)
    gpu.add_cast(half, x, 0.5)


@dataclass(frozen=True)
class Expected:
    """Expected machine code of the kernels that `start` launches.

    Attributes:
        start: launches the kernels.
        wide: instructions that must access 16 bytes per thread.
        warps: numbers of warps that must fit at once on capability 9.0 and 8.0.
    """

    start: Callable[[], None]
    wide: tuple[str, ...]
    warps: tuple[int, int]


BOTH, LOADS = ("LDG", "STG"), ("LDG",)
KERNELS: Mapping[str, Expected] = {
    "encode int8": Expected(lambda: encode("int8"), LOADS, (32, 32)),
    "encode int4": Expected(lambda: encode("int4"), LOADS, (24, 28)),
    "encode int4, stochastic": Expected(lambda: encode("int4", 1), LOADS, (20, 24)),
    "encode norm, stochastic": Expected(lambda: encode("norm", 1), LOADS, (16, 24)),
    "encode sign": Expected(lambda: encode("sign"), LOADS, (20, 24)),
    "encode four levels": Expected(lambda: encode("four levels"), LOADS, (16, 20)),
    "encode eight levels": Expected(lambda: encode("eight levels"), LOADS, (12, 16)),
    "decode eight levels, 8 messages": Expected(lambda: decode("eight levels", 8), LOADS, (16, 16)),
    "decode int4": Expected(lambda: decode("int4", 1), LOADS, (16, 16)),
    "decode int4, 8 messages": Expected(lambda: decode("int4", 8), LOADS, (16, 16)),
    "decode int8, 8 messages": Expected(lambda: decode("int8", 8), LOADS, (16, 12)),
    "top-k of 256": Expected(lambda: top_k(3, 256), LOADS, (20, 28)),
    "top-k of 4096": Expected(lambda: top_k(3, 4096), LOADS, (32, 32)),
    "top-k of 8192": Expected(lambda: top_k(3, 8192), LOADS, (32, 32)),
    "DCT": Expected(lambda: transform("dct_tiles", 64), BOTH, (16, 8)),
    "Hadamard": Expected(lambda: transform("hadamard_tiles", 32), BOTH, (32, 32)),
    "Hadamard of 4096": Expected(lambda: transform("hadamard_tiles", 64), BOTH, (20, 20)),
    "numbers": Expected(numbers, ("STG",), (40, 36)),
}


def compile_kernels(name: str, capability: int) -> list[CompiledKernel]:
    return compiled(KERNELS[name].start, capability)


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_spill_and_have_wide_accesses_and_enough_warps(
    compiler: Runner, name: str, capability: int
) -> None:
    expected, kernels = KERNELS[name], compiler(compile_kernels, name, capability)
    assert kernels
    for kernel in kernels:
        assert not kernel.uses_local_memory
        assert all(kernel.accesses(operation, 128) for operation in expected.wide), kernel.name
    assert min(kernel.warps_at_once for kernel in kernels) >= expected.warps[capability == 80]
