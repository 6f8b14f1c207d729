"""Operations of all processes of a run. If one of them fails, the launcher ends the others."""

import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process among the others."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first_only(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0 only. Its result reaches every rank."""
        shared: list[Any] = [action() if self.is_first else None]
        dist.broadcast_object_list(shared, src=0)
        value: T = shared[0]
        return value

    def print_once(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(text, flush=True)

    def once_per_node(self, action: Callable[[], object]) -> None:
        """Call `action` on rank 0, then on the first rank of each other node, which may have another disk."""
        if self.is_first:
            action()
        dist.barrier()
        if self.local_rank == 0 and not self.is_first:
            action()
        dist.barrier()


def start_ranks(local_rank: int) -> Ranks:
    """Join the processes that the launcher has started. Without a launcher, this process is the only rank."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
