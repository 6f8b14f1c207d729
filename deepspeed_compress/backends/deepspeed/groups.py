"""Groups of ranks that reduce together: the data-parallel group, its parts by node, and the groups of experts."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.units import node_unit
from deepspeed_compress.backends.groups import find_place_among, ranks_per_node, split_by_node
from deepspeed_compress.collectives.exchange import is_gloo
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reduction import Groups, SeparateParameters
from deepspeed_compress.compression.state_description import Position
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.session.patches import Patches


def reduction_group(engine: Any) -> ProcessGroup:
    """Return the group of ranks over which the gradients of `engine` are averaged.

    Under ZeRO 3, a parameter may be divided over other ranks than the engine's data-parallel group:
    `deepspeed.zero.Init` may have done so before tensor parallelism was known, or over the ranks of a sequence-parallel
    group too. All trained parameters must share one group; `limits` refuses other engines. If the model is sharded
    within nodes, these are the ranks that hold the same shard.
    """
    unit = node_unit(engine)
    if unit is not None:
        return unit.peers
    return next(iter(partition_groups(engine)), engine.seq_data_parallel_group)


def partition_groups(engine: Any) -> list[ProcessGroup]:
    """Return the groups over which ZeRO 3 divides trained parameters, in order of parameters; empty otherwise.

    Experts have other groups, and are left out: see `find_separate`.
    """
    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return []
    trained = (parameter for group in engine.optimizer.fp16_groups for parameter in group)
    return list(dict.fromkeys(parameter.ds_process_group for parameter in trained if not is_moe_param(parameter)))


def expert_names(engine: Any) -> dict[str, list[str]]:
    """Return the names of this rank's experts, by DeepSpeed's name of the group that averages them ("ep_size_2")."""
    names: dict[str, list[str]] = {}
    for parameter, name in engine.param_names.items():
        if is_moe_param(parameter):
            names.setdefault(parameter.group_name, []).append(name)
    return dict(sorted(names.items()))


def find_separate(engine: Any) -> list[SeparateParameters]:
    """Return the experts of `engine`, which are averaged over the ranks that hold the same ones. Collective."""
    found = []
    for group_name, names in expert_names(engine).items():
        group = engine.expert_data_parallel_group[group_name]
        # Ranks of one expert-parallel group hold different experts, whose parameters have equal names.
        owner = f"{group_name}_rank_{engine.expert_parallel_group[group_name].rank()}"
        groups = Groups(group, downward=downward_group(_all_groups(group)))
        found.append(SeparateParameters(owner, frozenset(names), groups))
    return found


def _all_groups(group: ProcessGroup) -> list[tuple[int, ...]]:
    """Return the global ranks of `group` and of the other ranks' groups, the same list on all ranks. Collective."""
    return sorted(set(gather_objects(tuple(dist.get_process_group_ranks(group)))))


def find_position(engine: Any, config: CompressConfig, island: Sequence[int] | None = None) -> Position:
    """Return the position of this rank among all data-parallel groups, which names its files. Collective."""
    position = find_place_among(reduction_group(engine), config, island)
    assert position is not None, "every rank of an engine reduces gradients"
    return position


def make_groups(engine: Any, config: CompressConfig) -> Groups:
    """Return the reduction group of `engine`, divided by nodes if `config` has a hierarchy. Collective.

    Raises:
        ConfigError: the division is impossible or has no effect.
    """
    unit = node_unit(engine)
    if unit is not None:
        return Groups(unit.peers, downward=unit.downward)
    whole = reduction_group(engine)
    on_node = ranks_per_node(config)
    everyone = _all_groups(whole)
    if on_node is None:
        return Groups(whole, downward=downward_group(everyone))
    divided = [split_by_node(group, on_node, dist.get_world_size()) for group in everyone]
    node = made_group([node for nodes in divided for node in nodes])
    places = [place for nodes in divided for place in zip(*nodes, strict=True)]
    return Groups(whole, node, made_group(places), downward_group(places))


def made_group(groups: Sequence[tuple[int, ...]], purpose: str | None = None) -> ProcessGroup:
    """Make all `groups`, and return the one that contains this rank. All ranks must call this with the same list.

    The group has `purpose` as its description.
    """
    made: list[ProcessGroup] = [dist.new_group(ranks, group_desc=purpose) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


def downward_group(groups: Sequence[tuple[int, ...]]) -> ProcessGroup | None:
    """Return a second group of the same ranks, for messages to lower ranks; None if it is not needed.

    It is needed if the backend sends point to point, on gloo; see `Link.start`. Collective.
    """
    if not is_gloo() or len(groups[0]) == 1:
        return None
    made = made_group(groups)
    # No rank may continue, and perhaps exit, while others still connect.
    dist.barrier()
    return made


def destroy_with_engine(engine: Any, groups: Iterable[ProcessGroup | None], patches: Patches) -> None:
    """Destroy `groups`, which hold sockets, when `engine` is destroyed or collected, or `patches` are undone.

    Only gloo's: on NCCL, destroying a group is collective, but ranks may not drop an engine at the same time.
    """
    patches.end_with(engine, destroy_groups, [group for group in groups if group is not None and is_gloo(group)])


def destroy_groups(groups: Sequence[ProcessGroup]) -> None:
    """Destroy `groups`, on gloo, of which some may have been destroyed before. Not collective."""
    for group in groups if dist.is_initialized() else ():
        # The program may have destroyed all groups and made new ones.
        with suppress(ValueError):
            dist.destroy_process_group(group)
