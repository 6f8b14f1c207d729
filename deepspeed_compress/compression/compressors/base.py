"""The compressor protocol: encode a flat tensor into one packed buffer of known size, and decode it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels.arguments import Keys, MessageTable, ResidualBuffers, next_key

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in the configuration."""


class Compressor(Protocol):
    """A pure, stateless encoder: all settings are fields, and all randomness comes from the key."""

    def payload_bytes(self, numel: int) -> int:
        """Return the exact payload size for `numel` elements: a multiple of `ALIGNMENT`, and 0 for no elements."""

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, not changed) into `out` (uint8 [payload_bytes(x.numel())]).

        `key` is the 64-bit key of the random numbers (see `message_key`). If an element of `x` is not finite, then at
        least one decoded element is not finite.
        """

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        """Add `scale` times the decoded `payload` (uint8) to `out` (flat fp32)."""


@runtime_checkable
class FusedFeedback(Protocol):
    """A compressor that applies error feedback in the same pass."""

    def compress_with_feedback(self, x: Tensor, out: Tensor, key: int, residual: ResidualBuffers) -> None:
        """Encode `x` + decay * before into `out`, as `compress` does, and store the error in `after`."""


@runtime_checkable
class ManyMessages(Protocol):
    """A compressor that encodes or decodes any number of messages at once, with the bits of one after another.

    Elements are at the positions that column `at` (`FIRST` or `SOURCE`) of the table holds.
    """

    def compress_all(
        self, x: Tensor, at: int, out: Tensor, table: MessageTable, keys: Keys, residual: ResidualBuffers | None
    ) -> None:
        """Encode the messages of `x` into their bytes of `out`.

        With a `residual` (only for `FusedFeedback`), whose elements are at `FIRST`: see `compress_with_feedback`.
        """

    def decompress_all(
        self, payloads: Tensor, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
    ) -> None:
        """Add `scale` times the sum of the decoded messages to their elements of `out`; if not `add`, to zeros.

        `payloads` is uint8 [n, bytes]; its n rows have the same table, and are added in order.
        """


def random_key(*parts: int) -> int:
    """Return a 64-bit key from (seed, step, message, rank, ...): SplitMix64's finalizer over the parts.

    Equal parts give equal keys on every machine. No global random state is involved.
    """
    state = 0
    for part in parts:
        state = next_key(state, part)
    return state


def random_keys(seed: Tensor, *sizes: int) -> Tensor:
    """Return `random_key(seed, i, j, ...)` for all i < sizes[0], j < sizes[1], ... as int64 of shape `sizes`.

    `seed` (int64 []) stays on its device, so the host does not wait for it.
    """
    state = _mixed(seed)
    for size in sizes:
        state = _mixed(state.unsqueeze(-1) + torch.arange(size, device=seed.device))
    return state


def _mixed(state: Tensor) -> Tensor:
    """Return `state` after one round of `random_key`, in int64 arithmetic.

    The constants are those of `random_key` as signed numbers, because products wrap around alike. The masks clear the
    sign bits that arithmetic shifts bring in.
    """
    state = state - 0x61C8864680B583EB
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return state ^ (state >> 31 & (1 << 33) - 1)


def message_key(message: tuple[int, ...], sender: int) -> int:
    """Return the key of a message, whose upper 32 bits are the same on all ranks.

    The upper 32 bits depend on `message` (seed, step, ...) alone. The lower 32 bits differ between senders, so that
    their rounding errors are independent.
    """
    shared = random_key(*message)
    return shared >> 32 << 32 | next_key(shared, sender) >> 32
