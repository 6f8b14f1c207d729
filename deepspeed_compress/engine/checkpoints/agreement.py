"""What all ranks decide alike by, without waiting for each other in the step that asks."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Agreement"]


@dataclass
class Agreement:
    """What all ranks of `group` know one step later: the largest of some numbers that each of them gives."""

    group: ProcessGroup
    numbers: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    work: dist.Work | None = None

    def begin(self, *numbers: int) -> None:
        """Ask. Collective; one question at a time."""
        self.numbers = torch.tensor(numbers, dtype=torch.int64)
        self.work = dist.all_reduce(self.numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish(self) -> list[int]:
        """The largest of each number. Only where it has begun."""
        assert self.work is not None, "nobody was asked"
        self.work.wait()
        self.work = None
        return [int(number) for number in self.numbers]
