"""Plain torch kernels that pack integers of a few bits into dense bit strings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_compress.compression.kernels.arguments import TRITS


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """Pack non-negative integers below 2**`width` into a dense little-endian bit string in `out` (uint8)."""
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
    """Invert `pack_bits`: return int64 [count]."""
    groups = -(-count // 8)
    raw = torch.zeros(groups * width, dtype=torch.int64, device=packed.device)
    used = min(raw.numel(), packed.numel())
    raw[:used] = packed[:used]
    columns = raw.new_zeros(groups, 8)
    for value, byte, shift in _overlaps(width):
        columns[:, value] |= _shifted_left(raw.view(groups, width)[:, byte], -shift)
    return (columns & ((1 << width) - 1)).view(-1)[:count]


def _overlaps(width: int) -> list[tuple[int, int, int]]:
    """Return (value, byte, shift) for every pair that shares bits when 8 values of `width` bits fill `width` bytes.

    Shifting the value left by `shift` aligns its bits with those of the byte.
    """
    return [
        (value, byte, value * width - byte * 8)
        for value in range(8 if width else 0)
        for byte in range(value * width // 8, ((value + 1) * width - 1) // 8 + 1)
    ]


def _shifted_left(x: Tensor, bits: int) -> Tensor:
    return x << bits if bits >= 0 else x >> -bits


def pack_codes(codes: Tensor, width: int, out: Tensor) -> None:
    """Pack the low `width` bits (1 to 8) of each byte of `codes` (uint8) like `pack_bits`; zero the rest of `out`."""
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
    """Invert `pack_codes`: return uint8 [count] below 2**`width`, possibly as a view of `packed`."""
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
    """Pack codes 0, 1 and 2 (uint8 [r, b]) as base-3 digits of bytes, each row zero-padded: uint8 [r, bytes]."""
    digits = F.pad(rows, (0, -rows.shape[1] % TRITS)).view(len(rows), -1, TRITS)
    packed = torch.zeros_like(digits[:, :, 0])
    for place in reversed(range(TRITS)):
        packed = packed * 3 + digits[:, :, place]
    return packed


def unpack_trits(packed: Tensor, width: int) -> Tensor:
    """Invert `pack_trits`: return uint8 [r, `width`]."""
    digits = packed.new_empty(*packed.shape, TRITS)
    for place in range(TRITS):
        torch.remainder(packed, 3, out=digits[:, :, place])
        packed = packed.div(3, rounding_mode="floor")
    return digits.view(len(packed), -1)[:, :width]
