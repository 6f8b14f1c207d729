"""Second moments of Adam that islands have alike but for their shape within blocks.

Each island sees a part of the batch. Where one of them saw a rare word its second moments are large, those of the
others small, and each divides by its own: the mean of what they moved is less than what one optimizer with all
of the batch would have done. Islands that average whole moments do not lose this (Local Adam, arXiv:2409.13155;
DES-LOC, arXiv:2505.22549), and send twice as much and more. Here they send the sum of each block, and every island
scales its own block to the mean of the sums. Nothing here knows DeepSpeed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moment", "Moments", "Shared"]


@dataclass(frozen=True)
class Moment:
    """Second moments of neighbouring weights. `values`: a flat view. `correction`: what Adam divides them by because
    they began with zeros, 1 - beta2 ** steps; islands that have taken more or fewer steps differ in it. 0 where there
    was no step yet, so that zeros stand for them."""

    values: Tensor
    correction: float = 1.0


class Moments:
    """The second moments of one rank.

    `find` gives them, of the same sizes in every exchange and on all ranks of equal place; zeros stand for what the
    optimizer has not stepped yet. `block_size`: elements that are scaled together, but for the rest of a view.
    `device`: of the exchange.
    """

    def __init__(self, find: Callable[[], Sequence[Moment]], block_size: int, device: torch.device) -> None:
        self._find, self._block_size, self._device = find, block_size, device

    def start(self, add_up: Callable[[Tensor], Any], weight: float) -> "Shared":
        """Begin to find the mean of the sums over the islands, in which this one counts by `weight`, unless a moment is
        not finite or the optimizer has not stepped. `add_up` begins to add up a tensor over the ranks of equal place,
        in place; None where there is one.
        """
        own, corrections = self.sums()
        finite, stepped = torch.isfinite(own), corrections > 0
        # fp32: what is rounded to 16 bits in every exchange no longer follows a small change.
        total = torch.cat([torch.where(finite & stepped, own / corrections, 0.0), own.new_ones(1)])
        total *= weight * finite.all() * stepped.any()
        return Shared(self, own, corrections, total, add_up(total))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Of every block of every view, one after the other, and its correction, each (blocks,), fp32."""
        none = torch.zeros(0, device=self._device)
        found = [(_sums(part).to(self._device), correction) for part, correction in self._parts()]
        return (
            torch.cat([none, *(one for one, _ in found)]),
            torch.cat([none, *(torch.full_like(one, correction) for one, correction in found)]),
        )

    def scale(self, before: Tensor, mean: Tensor) -> None:
        """Blocks that added up to `before` get the sum `mean`, and keep what has come since then; evenly where there is
        nothing, or nothing finite. What would be nothing stays as it is: Adam divides by it."""
        parts = [part for part, _ in self._parts()]
        sizes = [len(part) for part in parts]
        for part, *sums in zip(parts, torch.split(before, sizes), torch.split(mean, sizes), strict=True):
            _scale(part, *(one.to(part.device) for one in sums))

    def _parts(self) -> Iterator[tuple[Tensor, float]]:
        """Of each view its whole blocks, (blocks, block_size), and the rest, (1, less), as far as there are such."""
        for one in self._find():
            view = one.values
            whole = view.numel() - view.numel() % self._block_size
            for part in (view[:whole].view(-1, self._block_size), view[whole:].view(1, -1)):
                if part.numel():
                    yield part, one.correction


def _sums(part: Tensor) -> Tensor:
    return part.sum(1, dtype=torch.float32)


def _scale(part: Tensor, before: Tensor, mean: Tensor) -> None:
    """In place: rows of `part`, which added up to `before`."""
    now = _sums(part)
    since = (now - before).clamp_min_(0.0)
    target = mean + torch.where(torch.isfinite(since), since, 0.0)
    usable = torch.isfinite(now) & (now > 0)
    # In this order blocks of one become the same bits on all islands.
    scaled = torch.where(usable[:, None], part / now[:, None], 1 / part.shape[1]).mul_(target[:, None])
    part.copy_(torch.where(target[:, None] > 0, scaled, part))


@dataclass(frozen=True)
class Shared:
    """Sums on their way. `own`: before the exchange, as they are. `total`: of all islands, corrected and weighted, and
    then the weights."""

    moments: Moments
    own: Tensor
    corrections: Tensor
    total: Tensor
    work: Any

    def wait(self) -> None:
        """RuntimeError where another rank was lost."""
        if self.work is not None:
            self.work.wait()

    def apply(self) -> None:
        """Scale the moments, after `wait`; nothing where there is no other island, or none counts."""
        weight = self.total[-1]
        if self.work is not None and weight > 0:
            self.moments.scale(self.own, self.total[:-1] / weight * self.corrections)
