"""Plain torch implementations: the definition that faster kernels are tested against.

A "row" is one quantization or selection block. Everything is deterministic: the same input and key
give the same bits on every device.
"""

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def uniform(count: int, key: int, device: torch.device) -> Tensor:
    """`count` fp32 numbers in [0, 1), the i-th a pure function of (`key`, i).

    A counter goes through the 32-bit integer mixer "lowbias32" (C. Wellons' hash prospector), so the
    numbers need no state and are equal on every device. The upper 24 bits become the mantissa.
    """
    bits = torch.arange(count, dtype=torch.int64, device=device)
    bits.add_(key & _MASK32).bitwise_and_(_MASK32)
    bits ^= (key >> 32) & _MASK32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= bits >> shift
        bits.mul_(factor).bitwise_and_(_MASK32)
    bits ^= bits >> 16
    return (bits >> 8).to(torch.float32).mul_(2.0**-24)


def quantize_rows(rows: Tensor, levels: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Symmetric absmax quantization of each row.

    `rows`: fp32 [r, b]. Returns (scales fp32 [r], codes int8 [r, b] in -levels..levels): the largest
    magnitude of a row maps to `levels`. `noise` (fp32 [r, b] in [0, 1)) selects stochastic rounding,
    None rounds to nearest even. A row with a non-finite element gets a non-finite scale, so that it
    decodes as non-finite.
    """
    scales = rows.abs().amax(dim=1).div_(levels)
    # A scale may underflow to zero, or be so small that the quotient leaves the range of int8.
    quotient = rows / torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    quotient = quotient.round_() if noise is None else quotient.add_(noise).floor_()
    codes = quotient.clamp_(-levels, levels).nan_to_num_(0.0).to(torch.int8)
    return scales, codes


def dequantize_rows_add(scales: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
    """`out` (fp32 [r, b]) += `scale` * scales[:, None] * codes."""
    out.addcmul_(codes.to(torch.float32), (scales * scale).unsqueeze(1))


def pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """Two int8 codes in -8..7 to a byte of `out` (uint8), the first in the low half; an odd last one alone."""
    raw = codes.view(torch.uint8)
    low, high = raw[0::2], raw[1::2]
    torch.bitwise_and(low, 0xF, out=out)
    out[: high.numel()].bitwise_or_(high << 4)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_nibbles`: int8 [count]."""
    signed = packed.view(torch.int8)
    pairs = torch.stack(((signed << 4) >> 4, signed >> 4), dim=1)
    return pairs.view(-1)[:count]


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """Columns of the `k` largest magnitudes of each row: int64 [r, k], ascending; NaN counts as largest."""
    return rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """Non-negative integers below 2**`width` to a dense little-endian bit string in `out` (uint8)."""
    bits = (values.view(-1, 1) >> torch.arange(width, device=values.device)) & 1
    padded = bits.new_zeros(out.numel() * 8)
    padded[: bits.numel()] = bits.view(-1)
    weights = 1 << torch.arange(8, device=values.device)
    out.copy_((padded.view(-1, 8) * weights).sum(dim=1))


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_bits`: int64 [count]."""
    bits = (packed.to(torch.int64).unsqueeze(1) >> torch.arange(8, device=packed.device)) & 1
    weights = 1 << torch.arange(width, device=packed.device)
    return (bits.view(-1)[: count * width].view(count, width) * weights).sum(dim=1)
