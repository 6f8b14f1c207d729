"""The kernels that are measured: each with the work that it does in a step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels.forms import BlockFormat, ResidualBuffers

__all__ = ["BLOCK", "OPERATIONS", "Operation"]

BLOCK = 256
TOP_K_BLOCK, DENSITY = 4096, 0.01
KEY = 0x1234_5678_9ABC_DEF0
INT8, INT4, SIGN = (
    BlockFormat("absmax", 127, 8, BLOCK),
    BlockFormat("absmax", 7, 4, BLOCK),
    BlockFormat("mean", 1, 1, BLOCK),
)

Kernels = Any
"""A module of `deepspeed_compress.compression.kernels` that implements the operations."""


@dataclass(frozen=True)
class Operation:
    """`prepare(kernels, x)` returns the call that is timed, on the elements of `x` (flat fp32)."""

    name: str
    prepare: Callable[[Kernels, Tensor], Callable[[], object]]


def _quantize(
    form: BlockFormat, kernels: Kernels, x: Tensor, stochastic: bool = False, memory: torch.dtype | None = None
) -> Callable[[], object]:
    """Scales and packed codes of `x`, with error feedback in `memory` besides."""
    numbers, codes = _message(form, x)
    kept = torch.zeros(x.numel(), dtype=memory, device=x.device) if memory is not None else None
    feedback = ResidualBuffers(kept, 1.0, kept) if kept is not None else None
    key = KEY if stochastic else None
    return lambda: kernels.quantize_blocks(x, form, numbers, codes, key=key, memory=feedback)


def _dequantize(form: BlockFormat, kernels: Kernels, x: Tensor) -> Callable[[], object]:
    """Adding a message of as many elements as `x` to a sum."""
    numbers, codes = _message(form, x)
    kernels.quantize_blocks(x, form, numbers, codes)
    total = torch.zeros_like(x)
    return lambda: kernels.dequantize_blocks_add(numbers, codes, form, total, 0.5)


def _message(form: BlockFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the scales and the codes of `x`."""
    numbers = torch.empty(-(-x.numel() // form.block_size), device=x.device)
    return numbers, torch.empty(-(-x.numel() * form.bits // 8), dtype=torch.uint8, device=x.device)


def _top_k(kernels: Kernels, x: Tensor) -> Callable[[], object]:
    """Indices of the largest of each block."""
    rows = x[: x.numel() // TOP_K_BLOCK * TOP_K_BLOCK].view(-1, TOP_K_BLOCK)
    k = math.ceil(DENSITY * TOP_K_BLOCK)
    return lambda: kernels.top_k_rows(rows, k)


OPERATIONS: Sequence[Operation] = (
    Operation("quantize int8", partial(_quantize, INT8)),
    Operation("quantize int4", partial(_quantize, INT4)),
    Operation("quantize int4, stochastic", partial(_quantize, INT4, stochastic=True)),
    Operation("quantize sign", partial(_quantize, SIGN)),
    Operation("quantize int4, bf16 memory", partial(_quantize, INT4, memory=torch.bfloat16)),
    Operation("quantize sign, bf16 memory", partial(_quantize, SIGN, memory=torch.bfloat16)),
    Operation("decode-accumulate int8", partial(_dequantize, INT8)),
    Operation("decode-accumulate int4", partial(_dequantize, INT4)),
    Operation("decode-accumulate sign", partial(_dequantize, SIGN)),
    Operation("block top-k 1 % of 4096", _top_k),
)
"""In the order of the table."""
