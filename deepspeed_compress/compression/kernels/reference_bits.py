"""Plain torch: integers of a few bits as dense bit strings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_compress.compression.kernels.forms import TRITS

__all__ = ["pack_bits", "pack_codes", "pack_trits", "unpack_bits", "unpack_codes", "unpack_trits"]


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """Non-negative integers below 2**`width` to a dense little-endian bit string in `out` (uint8)."""
    groups = -(-values.numel() // 8)
    columns = torch.zeros(groups * 8, dtype=torch.int64, device=values.device)
    columns[: values.numel()] = values
    packed = columns.new_zeros(groups, width)
    for value, byte, shift in _overlaps(width):
        packed[:, byte] |= _shifted_left(columns[value::8], shift)
    used = min(packed.numel(), out.numel())
    out[:used] = (packed & 0xFF).view(-1)[:used]
    out[used:].zero_()


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_bits`: int64 [count]."""
    groups = -(-count // 8)
    raw = torch.zeros(groups * width, dtype=torch.int64, device=packed.device)
    used = min(raw.numel(), packed.numel())
    raw[:used] = packed[:used]
    columns = raw.new_zeros(groups, 8)
    for value, byte, shift in _overlaps(width):
        columns[:, value] |= _shifted_left(raw.view(groups, width)[:, byte], -shift)
    return (columns & ((1 << width) - 1)).view(-1)[:count]


def _overlaps(width: int) -> list[tuple[int, int, int]]:
    """(value, byte, shift) for every pair that shares bits when 8 values of `width` bits fill `width` bytes.

    The value shifted left by `shift` has its bits where the byte has them.
    """
    return [
        (value, byte, value * width - byte * 8)
        for value in range(8 if width else 0)
        for byte in range(value * width // 8, ((value + 1) * width - 1) // 8 + 1)
    ]


def _shifted_left(x: Tensor, bits: int) -> Tensor:
    return x << bits if bits >= 0 else x >> -bits


def pack_codes(codes: Tensor, width: int, out: Tensor) -> None:
    """The low `width` bits (1 to 8) of each byte of `codes` (uint8), as `pack_bits` does; the rest of `out` is 0."""
    used = -(-codes.numel() * width // 8)
    out[used:].zero_()
    low = codes & ((1 << width) - 1)
    if 8 % width:
        pack_bits(low, width, out[:used])
        return
    out[:used] = low[:: 8 // width]
    for place in range(1, 8 // width):
        part = low[place :: 8 // width]
        out[: part.numel()] |= part << width * place


def unpack_codes(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [count] below 2**`width`; may be a view of `packed`."""
    packed = packed[: -(-count * width // 8)]
    if 8 % width:
        return unpack_bits(packed, width, count).to(torch.uint8)
    if width == 8:
        return packed
    codes = packed.new_empty(packed.numel(), 8 // width)
    for place in range(8 // width):
        torch.bitwise_and(packed >> width * place, (1 << width) - 1, out=codes[:, place])
    return codes.view(-1)[:count]


def pack_trits(rows: Tensor) -> Tensor:
    """Codes 0, 1 and 2 (uint8 [r, b]) as digits of bytes, each row by itself, filled up by zeros: uint8 [r, bytes]."""
    digits = F.pad(rows, (0, -rows.shape[1] % TRITS)).view(len(rows), -1, TRITS)
    packed = torch.zeros_like(digits[:, :, 0])
    for place in reversed(range(TRITS)):
        packed = packed * 3 + digits[:, :, place]
    return packed


def unpack_trits(packed: Tensor, width: int) -> Tensor:
    """The inverse of `pack_trits`: uint8 [r, `width`]."""
    digits = packed.new_empty(*packed.shape, TRITS)
    for place in range(TRITS):
        torch.remainder(packed, 3, out=digits[:, :, place])
        packed = packed.div(3, rounding_mode="floor")
    return digits.view(len(packed), -1)[:, :width]
