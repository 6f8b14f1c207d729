"""Asynchronous agreement between ranks: a question in one step is answered in the next, without waiting."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass
class Agreement:
    """Maximum over all ranks of `group` of some numbers, available one step later.

    Attributes:
        group: the ranks.
        numbers: the numbers of this rank, and their maxima after `finish`; int64.
        work: the pending all-reduce; None if none is.
    """

    group: ProcessGroup
    numbers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    work: dist.Work | None = None

    def begin(self, *numbers: int) -> None:
        """Start an agreement on `numbers`. Collective; only one may be pending."""
        self.numbers = torch.tensor(numbers, dtype=torch.int64)
        self.work = dist.all_reduce(self.numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish(self) -> list[int]:
        """Wait, and return the maximum of each number over all ranks. `begin` must have been called."""
        assert self.work is not None, "no agreement is pending"
        self.work.wait()
        self.work = None
        return [int(number) for number in self.numbers]
