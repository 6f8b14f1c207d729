"""Additional process groups over the ranks of an engine's group.

Messages of several models, and of the engine itself, may be in progress at the same time. In one group, they could not
be told apart. Only the ranks inside a group take part in its creation, because others do not know of it. Two habits of
torch assume that all ranks of the job do: see `number_alike` and `make_group`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_group, _world

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.compression.state_description import Position
from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.errors import ConfigError


def make_groups(whole: ProcessGroup, config: CompressConfig) -> Groups:
    """Return groups of the ranks of `whole`, divided by nodes if `config` has a hierarchy.

    All ranks of `whole` must call this.

    Raises:
        ConfigError: the division is impossible or has no effect.
    """
    ranks, gloo = dist.get_process_group_ranks(whole), whole.name() == "gloo"
    nodes = _nodes(ranks, config)
    number_alike(whole)
    own = make_group(ranks)
    if nodes is None:
        return Groups(own, downward=make_group(ranks) if gloo and len(ranks) > 1 else None)
    node = next(make_group(one) for one in nodes if dist.get_rank() in one)
    place = next(one for one in zip(*nodes, strict=True) if dist.get_rank() in one)
    return Groups(own, node, make_group(place), make_group(place) if gloo else None)


def make_hybrid_groups(node: ProcessGroup, across: ProcessGroup, whole: ProcessGroup) -> Groups:
    """Return groups of the ranks of `whole` for copies of the model.

    Each `node` holds a copy, and the ranks of `across` hold the same part of it. All ranks of `whole` must call this.
    """
    ranks = [dist.get_process_group_ranks(group) for group in (whole, node, across)]
    downward = make_group(ranks[2]) if across.name() == "gloo" else None
    return Groups(make_group(ranks[0]), make_group(ranks[1]), make_group(ranks[2]), downward, copies=True)


def find_place_in(whole: ProcessGroup, config: CompressConfig) -> Position:
    """Return the position of this rank in `whole`, to which all of its residuals belong."""
    nodes = _nodes(dist.get_process_group_ranks(whole), config)
    return Position(whole.rank(), whole.size(), 0, 1, node_size=len(nodes[0]) if nodes else 1)


def find_place_among(
    whole: ProcessGroup | None, config: CompressConfig, island: Sequence[int] | None = None
) -> Position | None:
    """Return this rank's position among all ranks of the job, which form groups like `whole`; None if that is None.

    All ranks of the job must call this. If the global ranks of this rank's `island` are given, only groups of this
    island count, because each island has its own files.
    """
    mine: tuple[int, ...] = () if whole is None else tuple(dist.get_process_group_ranks(whole))
    every = set(gather_objects(mine)) - {()}
    groups = sorted(group for group in every if island is None or group[0] in island)
    if whole is None:
        return None
    return replace(find_place_in(whole, config), group=groups.index(mine), groups=len(groups))


def _nodes(ranks: Sequence[int], config: CompressConfig) -> list[tuple[int, ...]] | None:
    on_node = ranks_per_node(config)
    return None if on_node is None else split_by_node(ranks, on_node, dist.get_world_size())


def number_alike(*groups: ProcessGroup) -> None:
    """Give all ranks that `groups` connect the same number of process groups. Collective in each of them.

    torch names a new group by its ranks and by the number of groups that the process has. Ranks that are in other
    groups of the program would wait for each other under different names, so ranks that have fewer make groups of one.
    """
    most = len(_world.pg_names)
    for group in groups:
        most = max(gather_objects(most, group))
    while len(_world.pg_names) < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def make_group(ranks: Sequence[int]) -> ProcessGroup:
    """Return a new group of these global `ranks`, all of which must call this, after `number_alike`.

    If the program has bound a device to the default group, torch splits the communicator of that group, for which all
    ranks of the job must call. Without the device, it makes a new communicator.
    """
    world = _get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made: ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    made.bound_device_id = bound
    return made


def ranks_per_node(config: CompressConfig) -> int | None:
    """Return `ranks_per_node` of the hierarchy; None without one."""
    hierarchy = getattr(config.gradients, "hierarchy", None)
    return hierarchy.ranks_per_node if hierarchy else None


def split_by_node(group: Sequence[int], ranks_per_node: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the global ranks of `group` by node, if every node has `ranks_per_node` consecutive ranks of the job.

    Raises:
        ConfigError: unless there are at least two nodes, each with the same number of ranks of the group, two or more.
    """
    nodes = [tuple(ranks) for _, ranks in groupby(sorted(group), lambda rank: rank // ranks_per_node)]
    sizes = [len(node) for node in nodes]
    reasons = {
        f"does not divide the {world_size} ranks of the job": world_size % ranks_per_node,
        f"puts all {len(group)} data-parallel ranks on one node, which has no effect": len(nodes) < 2,
        f"puts unequal numbers of data-parallel ranks on the nodes: {', '.join(map(str, sizes))}": len(set(sizes)) > 1,
        "leaves one data-parallel rank on each node, which has no effect": max(sizes) == 1,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        raise ConfigError(
            f"/{SECTION}/gradients/hierarchy/ranks_per_node: {ranks_per_node} {reason} (allowed: the number of ranks "
            "that the launcher starts on each node). Write that, or remove the key hierarchy."
        )
    return nodes
