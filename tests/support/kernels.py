"""Operations of an implementation of the kernels, and those on messages for the scales and codes of one."""

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.compression import kernels
from deepspeed_compress.compression.kernels.arguments import FIRST, BlockFormat, Keys, MessageTable, single

_HELPERS = ("arguments", "compiled")


def operations(module: ModuleType) -> set[str]:
    """Return the names of the public functions of an implementation, without those of its helpers."""
    found = [(name, one.__module__) for name, one in inspect.getmembers(module, inspect.isfunction) if name[0] != "_"]
    ours = [(name, place.removeprefix(f"{kernels.__name__}.")) for name, place in found if "kernels." in place]
    return {name for name, place in ours if place not in _HELPERS}


def quantize_blocks(
    ops: Any, x: Tensor, form: BlockFormat, numbers: Tensor, codes: Tensor, key: int | None = None, residual: Any = None
) -> None:
    """Quantize `x` as one message, and copy its scales and codes to `numbers` and `codes`."""
    form = replace(form, scale_dtype=numbers.dtype)
    table, message, begin = message_of(form, x.numel(), numbers)
    keys = None if key is None else Keys.of_single(key)
    ops.quantize_messages(x, FIRST, form, message, table, keys, residual)
    numbers.copy_(message[: numbers.nbytes].view(numbers.dtype))
    codes.copy_(message[begin : begin + codes.numel()])


def dequantize_blocks_add(
    ops: Any, numbers: Tensor, codes: Tensor, form: BlockFormat, out: Tensor, scale: float
) -> None:
    """Add `scale` times a message of `numbers` and `codes` to `out`."""
    form = replace(form, scale_dtype=numbers.dtype)
    table, message, begin = message_of(form, out.numel(), numbers)
    message[: numbers.nbytes] = numbers.view(torch.uint8)
    message[begin : begin + codes.numel()] = codes
    ops.dequantize_messages(message.unsqueeze(0), form, table, out, FIRST, scale, True)


def message_of(form: BlockFormat, numel: int, numbers: Tensor) -> tuple[MessageTable, Tensor, int]:
    """Return the table of one message with `numbers`, an uncleared buffer for it, and where its codes begin."""
    begin = -(-numbers.nbytes // 4) * 4
    size = begin + -(-form.code_bytes(numel) // 4) * 4
    return single(numel, size), torch.full((size,), 0xFF, dtype=torch.uint8, device=numbers.device), begin
