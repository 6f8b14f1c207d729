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

__all__ = ["Moments", "Shared"]


class Moments:
    """The second moments of one rank.

    `find` gives them as flat views, of the same sizes in every exchange and on all ranks of equal place; zeros stand
    for what the optimizer has not stepped yet. `block_size`: elements that are scaled together, but for the rest of a
    view. `device`: of the exchange.
    """

    def __init__(self, find: Callable[[], Sequence[Tensor]], block_size: int, device: torch.device) -> None:
        self._find, self._block_size, self._device = find, block_size, device

    def start(self, add_up: Callable[[Tensor], Any], weight: float) -> "Shared":
        """Begin to find the mean of the sums over the islands, in which this one counts by `weight`. `add_up` begins to
        add up a tensor over the ranks of equal place, in place; None where there is one."""
        own = self.sums()
        weighted = torch.where(torch.isfinite(own), own, 0.0) * weight
        # A step of Adam goes by the root of a moment: 8 bits of precision are plenty, and their range is that of fp32.
        total = torch.cat([weighted, own.new_tensor([weight])]).to(torch.bfloat16)
        return Shared(self, own, total, add_up(total))

    def sums(self) -> Tensor:
        """Of every block of every view, one after the other, (blocks,), fp32."""
        found = [part.sum(1, dtype=torch.float32).to(self._device) for part in self._parts()]
        return torch.cat(found) if found else torch.zeros(0, device=self._device)

    def scale(self, own: Tensor, mean: Tensor) -> None:
        """Blocks that added up to `own` get the sum `mean`; evenly where there was nothing, or nothing finite."""
        parts = list(self._parts())
        sizes = [len(part) for part in parts]
        for part, before, after in zip(parts, torch.split(own, sizes), torch.split(mean, sizes), strict=True):
            before, after = (one.to(part.device).unsqueeze(1) for one in (before, after))
            usable = torch.isfinite(before) & (before > 0)
            # In this order blocks of one become the same bits on all islands.
            part.copy_(torch.where(usable, part / before, 1 / part.shape[1]).mul_(after))

    def _parts(self) -> Iterator[Tensor]:
        """Of each view its whole blocks, (blocks, block_size), and the rest, (1, less), as far as there are such."""
        for view in self._find():
            whole = view.numel() - view.numel() % self._block_size
            for part in (view[:whole].view(-1, self._block_size), view[whole:].view(1, -1)):
                if part.numel():
                    yield part


@dataclass(frozen=True)
class Shared:
    """Sums on their way. `own`: before the exchange. `total`: of all islands, weighted, and then the weights; bf16."""

    moments: Moments
    own: Tensor
    total: Tensor
    work: Any

    def wait(self) -> None:
        """RuntimeError where another rank was lost."""
        if self.work is not None:
            self.work.wait()

    def apply(self) -> None:
        """Scale the moments, after `wait`; nothing where there is no other island, or none counts."""
        total = self.total.float()
        if self.work is not None and total[-1] > 0:
            self.moments.scale(self.own, total[:-1] / total[-1])
