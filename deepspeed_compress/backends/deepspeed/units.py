"""Parts of a job's ranks in the form of DeepSpeed's `mpu`: islands, and nodes that hold a sharded copy of the model."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankUnit:
    """This rank's part of the job, over which DeepSpeed shards and reduces, in the form of DeepSpeed's `mpu`.

    Attributes:
        ranks: the global ranks of the part. `tensor` consecutive ones share each layer.
        number: the number of the part, from 0.
        count: the number of parts.
        tensor: the number of ranks that share each layer.
        whole: the group of all ranks of the part.
        data: the group of its ranks with the same tensor rank as this one.
        model: the group of ranks that share layers with this one.
        peers: the group of ranks with the same place in their parts.
        downward: a second group of `peers`; see `downward_group`.
    """

    pointer: ClassVar[str]
    """JSON pointer of the settings that divide the job."""
    parts: ClassVar[str]
    """Name of the parts in messages."""

    ranks: tuple[int, ...]
    number: int
    count: int
    tensor: int
    whole: ProcessGroup
    data: ProcessGroup
    model: ProcessGroup
    peers: ProcessGroup
    downward: ProcessGroup | None

    @property
    def place(self) -> int:
        """Return the index of this rank in its part, which is the same for all its peers."""
        return self.ranks.index(dist.get_rank())

    @property
    def made(self) -> list[ProcessGroup | None]:
        """Return the groups that were made for this unit alone. Under AutoTP, DeepSpeed has made `model`."""
        return [self.whole, self.data, self.peers, self.downward, self.model if self.tensor == 1 else None]

    @property
    def share_of_job(self) -> tuple[int, int]:
        """Return which share of the job's batch this rank reads: (index of the share, number of shares)."""
        return dist.get_rank() // self.tensor, self.count * len(self.ranks) // self.tensor

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self.ranks[self.get_model_parallel_rank() :: self.tensor])

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks) // self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.place // self.tensor

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return self.place % self.tensor

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_rank() - self.get_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    # Other names that DeepSpeed uses (`bwc_tensor_model_parallel_rank` and others).
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


class IslandUnit(RankUnit):
    """This rank's island. Islands train by themselves, and exchange their weights now and then."""

    pointer: ClassVar[str] = "/deepspeed_compress/islands"
    parts: ClassVar[str] = "islands"


class NodeUnit(RankUnit):
    """This rank's node, which holds a complete copy of the model, sharded over its ranks.

    Nodes average their gradients in every step, so all of them hold the same weights.
    """

    pointer: ClassVar[str] = "/deepspeed_compress/parallelism/shard_within"
    parts: ClassVar[str] = "nodes"


def deciding_group(engine: Any) -> ProcessGroup | None:
    """Return the group of ranks that must decide alike: those of this rank's island; None for the whole job."""
    return engine.mpu.whole if isinstance(engine.mpu, IslandUnit) else None


def node_unit(engine: Any) -> NodeUnit | None:
    """Return the node of this rank if `engine` shards its model within nodes; None otherwise."""
    return engine.mpu if isinstance(engine.mpu, NodeUnit) else None
