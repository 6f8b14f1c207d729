"""Operations of all processes of a run.

An error on one process is raised on all of them, so that no process waits for one that has stopped.
"""

import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_compress.errors import CompressError

T = TypeVar("T")


class AgreedError(CompressError):
    """Error that all ranks raise together, so that one of them can report it for all."""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process among the others."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank. A CompressError on any rank becomes an AgreedError on all of them."""
        outcome: list[T] = []
        error: CompressError | None = None
        try:
            outcome.append(action())
        except CompressError as caught:
            error = caught
        errors: list[CompressError | None] = [None] * self.world_size
        dist.all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                raise AgreedError(str(found)) from found
        return outcome[0]

    def first_only(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0 only. Its result, or an AgreedError, reaches every rank."""
        result = self.agree(lambda: action() if self.is_first else None)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, src=0)
        value: T = shared[0]
        return value

    def print_once(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(text, flush=True)

    def once_per_node(self, action: Callable[[], object]) -> None:
        """Call `action` on rank 0, then on the first rank of each other node, which may have another disk."""
        self.agree(lambda: action() if self.is_first else None)
        self.agree(lambda: action() if self.local_rank == 0 and not self.is_first else None)


def start_ranks(local_rank: int) -> Ranks:
    """Join the processes that the launcher has started. Without a launcher, this process is the only rank."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        os.environ.update(single)
    os.environ.setdefault("LOCAL_RANK", str(max(local_rank, 0)))
    local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(local_rank)
    deepspeed.init_distributed()
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank)


def end_ranks() -> None:
    """Destroy the process groups, including DeepSpeed's references to them.

    If a process ends while the threads of a group are alive, it may abort although its program has succeeded. Engines
    that are not destroyed keep their groups alive.
    """
    import deepspeed

    gc.collect()
    deepspeed.comm.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
