"""Adam second moments that are equalized across islands except for their shape within blocks.

Each island sees a part of the batch. If only one island sees a rare word, its second moments are large, those of the
others are small, and each divides by its own. The mean of the resulting updates is then smaller than the update of one
optimizer with the whole batch. Islands that average whole moments avoid this (Local Adam, arXiv:2409.13155; DES-LOC,
arXiv:2505.22549) but send at least twice as much. Here, islands send only the sum of each block, and every island
scales its own blocks to the mean of the sums. This module is independent of DeepSpeed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SecondMoment:
    """Second moments of neighboring weights.

    Attributes:
        values: a flat view.
        correction: Adam's bias correction, 1 - beta2 ** steps. It differs between islands that have taken different
            numbers of steps. 0 if there was no step yet and `values` are placeholder zeros.
    """

    values: Tensor
    correction: float = 1.0


class SecondMoments:
    """The second moments of one rank.

    Args:
        find: returns them, with the same sizes in every exchange and on all ranks of equal place. Zeros stand for
            moments that the optimizer has not updated yet.
        block_size: number of elements that are scaled together. The remainder of a view forms a smaller block.
        device: device of the exchange.
    """

    def __init__(self, find: Callable[[], Sequence[SecondMoment]], block_size: int, device: torch.device) -> None:
        self._find, self._block_size, self._device = find, block_size, device

    def start(self, start_sum: Callable[[Tensor], Any], weight: float) -> "PendingMoments":
        """Start to compute the mean of the block sums over the islands.

        This island has weight `weight`, or 0 if a moment is not finite or the optimizer has not taken a step.

        Args:
            start_sum: starts to sum a tensor in place over the ranks of equal place, and returns a handle, or None if
                there is no other rank.
            weight: weight of this island.
        """
        own, corrections = self.sums()
        finite, stepped = torch.isfinite(own), corrections > 0
        # fp32: 16-bit rounding in every exchange would lose small changes.
        total = torch.cat([torch.where(finite & stepped, own / corrections, 0.0), own.new_ones(1)])
        total *= weight * finite.all() * stepped.any()
        return PendingMoments(self, own, corrections, total, start_sum(total))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sum and the correction of every block of every view, each fp32 [blocks]."""
        none = torch.zeros(0, device=self._device)
        found = [(_sums(part).to(self._device), correction) for part, correction in self._parts()]
        return (
            torch.cat([none, *(one for one, _ in found)]),
            torch.cat([none, *(torch.full_like(one, correction) for one, correction in found)]),
        )

    def scale(self, before: Tensor, mean: Tensor) -> None:
        """Scale the blocks that had sums `before` to the sums `mean`, and keep what was added since then.

        A block with a sum that is zero or not finite is filled evenly. A block with target sum 0 stays as it is,
        because Adam divides by its values.
        """
        parts = [part for part, _ in self._parts()]
        sizes = [len(part) for part in parts]
        for part, *sums in zip(parts, torch.split(before, sizes), torch.split(mean, sizes), strict=True):
            earlier, target = (one.to(part.device) for one in sums)
            now = _sums(part)
            since = (now - earlier).clamp_min_(0.0)
            target = target + torch.where(torch.isfinite(since), since, 0.0)
            usable = torch.isfinite(now) & (now > 0)
            # With this order of operations, blocks of one element get the same bits on all islands.
            scaled = torch.where(usable[:, None], part / now[:, None], 1 / part.shape[1]).mul_(target[:, None])
            part.copy_(torch.where(target[:, None] > 0, scaled, part))

    def _parts(self) -> Iterator[tuple[Tensor, float]]:
        """Yield the whole blocks of each view, (blocks, block_size), and its rest, (1, rest), if not empty."""
        for one in self._find():
            view = one.values
            whole = view.numel() - view.numel() % self._block_size
            for part in (view[:whole].view(-1, self._block_size), view[whole:].view(1, -1)):
                if part.numel():
                    yield part, one.correction


def _sums(part: Tensor) -> Tensor:
    return part.sum(1, dtype=torch.float32)


@dataclass(frozen=True)
class PendingMoments:
    """Handle of an exchange of sums in progress.

    Attributes:
        moments: the moments to scale.
        own: block sums of this island before the exchange.
        corrections: bias corrections of the blocks.
        total: corrected and weighted sums over all islands, followed by the sum of the weights.
        work: handle of the exchange; None if there is no other island.
    """

    moments: SecondMoments
    own: Tensor
    corrections: Tensor
    total: Tensor
    work: Any

    def wait(self) -> None:
        """Wait for the sums.

        Raises:
            RuntimeError: another rank was lost.
        """
        if self.work is not None:
            self.work.wait()

    def apply(self) -> None:
        """Scale the moments, after `wait`. Does nothing if there is no other island or the total weight is 0."""
        weight = self.total[-1]
        if self.work is not None and weight > 0:
            self.moments.scale(self.own, self.total[:-1] / weight * self.corrections)
