"""Tables of messages: where the elements and the bytes of each message lie, for kernels that process all at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SOURCE, FIRST, NUMEL, BEGIN, END, OWNER, CHANNEL = range(7)
"""Columns of `MessageTable.rows`."""
_MASK = (1 << 64) - 1


def next_key(state: int, part: int) -> int:
    """Return the key of the parts that gave `state`, and `part`: SplitMix64's finalizer."""
    state = (state + part + 0x9E3779B97F4A7C15) & _MASK
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
        self.derive(kind, lambda: self._check_bytes(bytes_of))

    def _check_bytes(self, bytes_of: Callable[[int], int]) -> Tensor:
        for row in self.values:
            if row[END] - row[BEGIN] != bytes_of(row[NUMEL]) or row[BEGIN] % 4:
                raise ValueError(f"message of {row[END] - row[BEGIN]} bytes for {row[NUMEL]} elements")
        return self.rows


@lru_cache(maxsize=1024)
def single(numel: int, size: int) -> MessageTable:
    """Return the table of one message of `numel` elements and `size` bytes."""
    return MessageTable(torch.tensor([[0, 0, numel, 0, size, 0, 0]]))
