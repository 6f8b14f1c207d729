"""Which tokens a step reads.

There is no iterator state: what step n reads follows from (seed, n) alone, so a resumed run reads on exactly,
and the batch of a step is the same at any number of data-parallel ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_compress.training.data.tokens import TokenCache
from deepspeed_compress.errors import DataError

Segment = tuple[int, int]
"""First token and end of a stretch of text that a window may not leave."""


@dataclass(frozen=True)
class Windows:
    """Stretches of a token cache, cut into windows of `length` tokens."""

    cache: TokenCache
    segments: tuple[Segment, ...]
    length: int

    def read(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the windows that begin at `starts` (n,), as (n, length)."""
        return np.asarray(self.cache.tokens[starts[:, None] + np.arange(self.length)], dtype=np.int64)


def split_windows(cache: TokenCache, length: int, held_out: float) -> tuple[Windows, Windows]:
    """(train, held out): the last `held_out` of each file is never trained on.

    Raises DataError when either part has no window of `length` tokens.
    """
    cuts = [(start, end - int((end - start) * held_out), end) for start, end in pairwise(cache.bounds)]
    train = _windows(cache, [(start, cut) for start, cut, _ in cuts], length, "train")
    evaluation = _windows(cache, [(cut, end) for _, cut, end in cuts], length, "held-out")
    return train, evaluation


def step_starts(windows: Windows, count: int, seed: int, step: int) -> NDArray[np.int64]:
    """First tokens of the `count` windows of a step, (count,), drawn uniformly with replacement."""
    positions = np.array([end - start - windows.length + 1 for start, end in windows.segments])
    last = positions.cumsum()
    drawn = np.random.default_rng((seed, step)).integers(last[-1], size=count)
    segment = np.searchsorted(last, drawn, side="right")
    first = np.array([start for start, _ in windows.segments])
    return np.asarray(first[segment] + drawn - (last - positions)[segment], dtype=np.int64)


def eval_starts(windows: Windows, batches: int, batch_size: int) -> NDArray[np.int64]:
    """First tokens of the held-out windows, (batches or fewer, batch_size): disjoint, spread evenly.

    Raises DataError when the held-out text has fewer than `batch_size` windows.
    """
    places = np.fromiter(_disjoint(windows), dtype=np.int64)
    batches = min(batches, places.size // batch_size)
    if batches == 0:
        hint = "write a larger --held-out or a smaller --seq-len, or give more text"
        raise DataError(f"held-out text has {places.size} windows, one batch needs {batch_size}; {hint}")
    chosen = np.linspace(0, places.size - 1, batches * batch_size).round().astype(np.int64)
    return places[chosen].reshape(batches, batch_size)


def _disjoint(windows: Windows) -> Iterator[int]:
    for start, end in windows.segments:
        yield from range(start, end - windows.length + 1, windows.length)


def _windows(cache: TokenCache, segments: list[Segment], length: int, name: str) -> Windows:
    kept = tuple((start, end) for start, end in segments if end - start >= length)
    if not kept:
        total = sum(end - start for start, end in segments)
        hint = "write a smaller --seq-len, another --held-out, or give more text"
        raise DataError(f"{name} text: {total} tokens, no file with {length} together (--seq-len); {hint}")
    return Windows(cache, kept, length)
