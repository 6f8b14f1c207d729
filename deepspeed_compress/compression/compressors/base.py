"""The contract of a compressor: a flat tensor in, one packed buffer of known size out, and back."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels.forms import ResidualBuffers

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "Compressor",
    "FusedFeedback",
    "FusedSum",
    "aligned",
    "message_key",
    "random_key",
    "random_keys",
]

ALIGNMENT = 4
"""Payload sizes are multiples of this many bytes, so that fp32 fields can be viewed in place."""


DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""By the names that configurations have."""


class Compressor(Protocol):
    """Pure and stateless: all settings are fields, all randomness comes from the key."""

    def payload_bytes(self, numel: int) -> int:
        """Exact size of the payload of `numel` elements; 0 for none; a multiple of `ALIGNMENT`."""

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32) into `out` (uint8 [payload_bytes(x.numel())]). `x` is not changed.

        `key` is the 64-bit key of the random numbers (see `message_key`). A non-finite element of `x` makes
        at least one decoded element non-finite.
        """

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        """`out` (flat fp32) += `scale` * decoded `payload` (uint8)."""


@runtime_checkable
class FusedFeedback(Protocol):
    """A compressor that does the work of error feedback in the same pass."""

    def compress_with_feedback(self, x: Tensor, out: Tensor, key: int, memory: ResidualBuffers) -> None:
        """Encode `x` + decay * before into `out`, as `compress` does; what it leaves out becomes `after`."""


@runtime_checkable
class FusedSum(Protocol):
    """A compressor that adds the messages of several ranks in one pass over the sum."""

    def decompress_sum(self, payloads: Sequence[Tensor], out: Tensor, scale: float, add: bool) -> None:
        """As `decompress_add` of each of `payloads`, in their order; unless `add`, in place of what is in `out`."""


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def random_key(*parts: int) -> int:
    """A 64-bit key from (seed, step, message, rank, ...): the finalizer of SplitMix64 over the parts.

    Equal parts give an equal key on every machine; no global random state takes part.
    """
    mask = (1 << 64) - 1
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


def random_keys(seed: Tensor, *sizes: int) -> Tensor:
    """`random_key(seed, i, j ...)` for all i < sizes[0], j < sizes[1] ...: int64 `sizes`, with the bits of the keys.

    `seed` (int64 []) stays on its device: no host waits for it.
    """
    state = _mixed(seed)
    for size in sizes:
        state = _mixed(state.unsqueeze(-1) + torch.arange(size, device=seed.device))
    return state


def _mixed(state: Tensor) -> Tensor:
    """A round of `random_key`: constants are those above as signed numbers, since products wrap around alike, and
    shifts clear the signs that they bring in."""
    state = state - 0x61C8864680B583EB
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return state ^ (state >> 31 & (1 << 33) - 1)


def message_key(message: tuple[int, ...], sender: int) -> int:
    """The key of a message: its upper 32 bits come from `message` (seed, step, ...) alone, so all ranks have the same.

    The lower 32 bits differ from sender to sender, so that their rounding errors are independent.
    """
    return random_key(*message) >> 32 << 32 | random_key(*message, sender) >> 32
