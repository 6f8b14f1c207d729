"""Which ranks reduce together: the data-parallel group, and its parts on this node and across nodes."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.reduction import Groups
from deepspeed_compress.compression.state import Position
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.session.nodes import ranks_per_node, split_by_node

__all__ = [
    "downward_group",
    "find_position",
    "made_group",
    "make_groups",
    "partition_groups",
    "reduction_group",
]


def reduction_group(engine: Any) -> ProcessGroup:
    """The ranks over which the gradients of `engine` are averaged.

    Under ZeRO 3 a parameter may have been divided over other ranks than those of the engine's data-parallel group: by
    `deepspeed.zero.Init` before tensor parallelism was known, or over those of a sequence-parallel group too. All
    parameters that are trained must share a group: `limits` refuses others.
    """
    return next(iter(partition_groups(engine)), engine.seq_data_parallel_group)


def partition_groups(engine: Any) -> list[ProcessGroup]:
    """The groups that ZeRO 3 divides trained parameters over, in order of parameters; none under other stages."""
    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return []
    trained = (parameter for group in engine.optimizer.fp16_groups for parameter in group)
    return list(dict.fromkeys(parameter.ds_process_group for parameter in trained))


def _all_groups(engine: Any) -> list[tuple[int, ...]]:
    """Global ranks of every data-parallel group, the same list on all ranks. A collective call."""
    mine = tuple(dist.get_process_group_ranks(reduction_group(engine)))
    found: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return sorted(set(found))


def find_position(engine: Any, config: CompressConfig, island: Sequence[int] | None = None) -> Position:
    """Where this rank is among all data-parallel groups; among those of its `island`, of these ranks, if there is one:
    each has files of its own. A collective call."""
    groups, rank = _all_groups(engine), dist.get_rank()
    if island is not None:
        groups = [group for group in groups if group[0] in island]
    number, mine = next((number, group) for number, group in enumerate(groups) if rank in group)
    on_node = ranks_per_node(config)
    nodes = split_by_node(mine, on_node, dist.get_world_size()) if on_node else [(rank,)]
    return Position(mine.index(rank), len(mine), number, len(groups), node_size=len(nodes[0]))


def make_groups(engine: Any, config: CompressConfig) -> Groups:
    """The group of `engine`, divided by nodes if `config` has a hierarchy. A collective call.

    Raises ConfigError when the division is impossible or has no effect.
    """
    whole = reduction_group(engine)
    on_node = ranks_per_node(config)
    everyone = _all_groups(engine)
    if on_node is None:
        return Groups(whole, downward=downward_group(everyone))
    divided = [split_by_node(group, on_node, dist.get_world_size()) for group in everyone]
    node = made_group([node for nodes in divided for node in nodes])
    places = [place for nodes in divided for place in zip(*nodes, strict=True)]
    return Groups(whole, node, made_group(places), downward_group(places))


def made_group(groups: Sequence[tuple[int, ...]]) -> ProcessGroup:
    """New `groups`, of which this rank's is returned. All ranks must make all groups, in the same order."""
    made: dict[tuple[int, ...], ProcessGroup] = {ranks: dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


def downward_group(groups: Sequence[tuple[int, ...]]) -> ProcessGroup | None:
    """See `start_exchange`: where messages go point to point, on gloo."""
    if dist.get_backend() != "gloo" or len(groups[0]) == 1:
        return None
    made = made_group(groups)
    # Nobody may go on, and perhaps end, while others still connect.
    dist.barrier()
    return made
