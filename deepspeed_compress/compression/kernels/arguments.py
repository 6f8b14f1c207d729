"""Arguments of kernels: the format of blocks and codes, error-feedback buffers, and tables of messages."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

ALIGNMENT = 4
"""Payload sizes are multiples of this many bytes, so that fp32 fields can be viewed in place."""
TRITS = 5
"""Number of ternary codes per byte: 3**5 = 243 of its 256 values."""


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FittedLevels:
    """Levels whose scale is fitted to the elements.

    Attributes:
        magnitudes: magnitudes of the levels in units of the scale, ascending.
        start: initial scale, in units of mean |x|.
        iterations: number of iterations of the fit.
    """

    magnitudes: tuple[int, ...]
    start: float
    iterations: int

    @property
    def borders(self) -> tuple[float, ...]:
        """Return the thresholds between neighboring levels, in units of the scale."""
        return tuple((low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False))


# A compromise between the optimal ratios for normal and for Laplace distributed elements (Lloyd, Max): for both, the
# error is within a sixth of the optimum. The initial scales are a compromise as well.
LEVELS: Mapping[str, FittedLevels] = {
    "ternary": FittedLevels((0, 1), 1.5, iterations=1),
    "lloyd": FittedLevels((1, 4), 0.5, iterations=2),
    "eight": FittedLevels((1, 3, 6, 10), 1 / 3, iterations=1),
}
"""Levels of the kinds of `BlockFormat` whose scale is fitted."""
OUTER = LEVELS["lloyd"].magnitudes[-1]
"""Magnitude of the outer levels of kind "lloyd", in units of the scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Format of blocks of `block_size` elements (the last one may be shorter), with one scale s per block.

    Each element has a code of `bits` bits. `levels` is the largest magnitude of a code. A message holds the scales of
    all blocks in `scale_dtype`, and then the codes as a little-endian bit string, each zero-padded to a multiple of
    `ALIGNMENT` bytes. Kinds:

    - "absmax": s = max|x| / `levels`; codes are round(x / s) in two's complement.
    - "norm": s = ||x||_2 / `levels`; codes as for "absmax".
    - "mean": s = mean |x|; the code is 1 for x >= 0 (1 bit).
    - "lloyd": levels -4s, -s, s and 4s, with s fitted by two iterations of Lloyd's algorithm; the code is 2 for x >= 0,
      plus 1 for an outer level (2 bits).
    - "eight": levels of magnitude s, 3s, 6s and 10s, one iteration; the code is 4 for x >= 0, plus 0 to 3 (3 bits).
    - "ternary": levels -s, 0 and s, one iteration; the code is 0, 1 or 2. `TRITS` codes of a block are the digits of a
      byte, lowest first (`bits` is 2, the size of a single code).
    """

    kind: str
    levels: int
    bits: int
    block_size: int
    scale_dtype: torch.dtype = torch.float32

    @property
    def largest_scale(self) -> float:
        """Return the largest scale whose products with codes stay within the range of bf16."""
        return scale_limit(self.scale_dtype, self.levels)

    def message_bytes(self, numel: int) -> int:
        """Return the size in bytes of a message of `numel` elements."""
        return aligned(self.scale_bytes(numel)) + aligned(self.code_bytes(numel))

    def scale_bytes(self, numel: int) -> int:
        """Return the size in bytes of the scales of `numel` elements."""
        return -(-numel // self.block_size) * self.scale_dtype.itemsize

    def code_bytes(self, numel: int) -> int:
        """Return the size in bytes of the packed codes of `numel` elements."""
        if self.kind != "ternary":
            return -(-numel * self.bits // 8)
        whole, rest = divmod(numel, self.block_size)
        return whole * -(-self.block_size // TRITS) + -(-rest // TRITS)


@dataclass(frozen=True)
class ResidualBuffers:
    """Error-feedback buffers of a message: flat fp32 or bf16, as long as the message.

    Attributes:
        before: residual that is added to the message, times `decay`.
        decay: factor of `before`.
        after: buffer for the new residual. May be `before` itself.
    """

    before: Tensor
    decay: float
    after: Tensor

    def part(self, begin: int, end: int) -> "ResidualBuffers":
        """Return the buffers of the elements from `begin` to `end`."""
        return ResidualBuffers(self.before[begin:end], self.decay, self.after[begin:end])


def scale_limit(dtype: torch.dtype, levels: int = 1) -> float:
    """Return the largest scale of `dtype` that, multiplied by `levels`, stays within the range of bf16."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max / levels)


def fitted(scales: Tensor, dtype: torch.dtype, levels: int = 1) -> Tensor:
    """Return `scales` (fp32 or fp64, >= 0) as the receiver sees them: rounded to `dtype`, as fp32.

    A finite scale stays finite, and so does `levels` times it: larger scales become the largest number of `dtype`, or
    that of bf16 divided by `levels`. Infinity and NaN are kept. Small scales may become 0.
    """
    rounded = scales.clamp(max=scale_limit(dtype, levels)).to(dtype).to(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales.to(torch.float32))


SOURCE, FIRST, NUMEL, BEGIN, END, OWNER, CHANNEL = range(7)
"""Columns of `MessageTable.rows`."""
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def next_key(state: int, part: int) -> int:
    """Return the key of the parts that gave `state`, and `part`: SplitMix64's finalizer."""
    state = (state + part + _STEP) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ state >> 31


@dataclass(frozen=True)
class Keys:
    """Random keys of the messages of one round: `message_key((..., owner, channel), sender)` for each of them.

    Attributes:
        state: `random_key(...)` of what all of them share.
        sender: number of the sender.
    """

    state: int
    sender: int

    def of(self, owner: int, channel: int) -> int:
        """Return the key of one message."""
        shared = next_key(next_key(self.state, owner), channel)
        return shared >> 32 << 32 | next_key(shared, self.sender) >> 32

    @classmethod
    def of_single(cls, key: int) -> "Keys":
        """Return the keys with which the message of `single` has `key`."""
        shared = key >> 32 << 32
        return cls(_former(_former(shared)), (_former(key << 32 & _MASK) - shared) & _MASK)


def _former(key: int) -> int:
    """Return the state from which `next_key` makes `key` with the part 0: its steps are undone one by one."""
    key ^= key >> 31 ^ key >> 62
    key = key * 0x319642B2D24D8EC3 & _MASK
    key ^= key >> 27 ^ key >> 54
    key = key * 0x96DE1B173F119089 & _MASK
    return (key ^ key >> 30 ^ key >> 60) - _STEP & _MASK


@dataclass(frozen=True, eq=False)
class MessageTable:
    """Table of messages. It depends on the message layout alone, so whatever is derived from it is kept.

    Attributes:
        rows: int64 [messages, 7] on the CPU. Elements begin at `FIRST` of a flat tensor or at `SOURCE` of the tensor
            that they come from, where a message that is not contiguous has -1. Its bytes are `BEGIN` to `END`. `OWNER`
            and `CHANNEL` are parts of its key.
    """

    rows: Tensor
    _derived: dict[object, Tensor] = field(default_factory=dict)
    _checked: set[object] = field(default_factory=set)

    def derive(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor `name` that `make` makes, at the first call, from this table."""
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]

    @cached_property
    def ends(self) -> tuple[int, int, int]:
        """Return the numbers of elements in the source and in the flat tensor, and of bytes, that the messages span."""
        if not len(self.rows):
            return 0, 0, 0
        last = [int((self.rows[:, column] + self.rows[:, NUMEL]).max()) for column in (SOURCE, FIRST)]
        return last[0], last[1], int(self.rows[:, END].max())

    @cached_property
    def values(self) -> list[list[int]]:
        """Return the rows as numbers, for implementations that process one message after another."""
        rows: list[list[int]] = self.rows.tolist()
        return rows

    @cached_property
    def least(self) -> list[int]:
        """Return the smallest number in each column."""
        return [min(column, default=0) for column in zip(*self.values, strict=True)] or [0] * self.rows.shape[1]

    @cached_property
    def divisors(self) -> list[int]:
        """Return the largest common divisor of each column."""
        return [math.gcd(*column) for column in zip(*self.values, strict=True)] or [0] * self.rows.shape[1]

    def check_elements(self, column: int, numel: int) -> None:
        """Check that a tensor of `numel` elements holds those of all messages, because kernels trust the table.

        Raises:
            ValueError: it does not, or a message is not contiguous there.
        """
        if self.ends[column] > numel or self.least[column] < 0:
            raise ValueError(f"expected {self.ends[column]} elements, got {numel}")

    def check_bytes(self, size: int, kind: object, bytes_of: Callable[[int], int]) -> None:
        """Check that a tensor of `size` bytes holds all messages of `kind`, and that they are long enough.

        Args:
            size: number of bytes.
            kind: name of the content of messages.
            bytes_of: returns the number of bytes of a message of this kind, given its number of elements.

        Raises:
            ValueError: the tensor or a message has another size.
        """
        if self.ends[2] > size:
            raise ValueError(f"expected messages of {self.ends[2]} bytes, got {size}")
        if kind in self._checked:
            return
        for row in self.values:
            if row[END] - row[BEGIN] != bytes_of(row[NUMEL]) or row[BEGIN] % ALIGNMENT:
                raise ValueError(f"message of {row[END] - row[BEGIN]} bytes for {row[NUMEL]} elements")
        self._checked.add(kind)


@lru_cache(maxsize=1024)
def single(numel: int, size: int) -> MessageTable:
    """Return the table of one message of `numel` elements and `size` bytes."""
    return MessageTable(torch.tensor([[0, 0, numel, 0, size, 0, 0]]))
