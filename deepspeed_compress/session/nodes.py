"""Grouping of ranks by node, for hierarchies."""

from collections.abc import Sequence
from itertools import groupby

from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import ConfigError

_POINTER = "/deepspeed_compress/gradients/hierarchy/ranks_per_node"


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
    sizes = {len(node) for node in nodes}
    reason = None
    if world_size % ranks_per_node:
        reason = f"does not divide the {world_size} ranks of the job"
    elif len(nodes) < 2:
        reason = f"puts all {len(group)} data-parallel ranks on one node, which has no effect"
    elif len(sizes) > 1:
        reason = f"puts unequal numbers of data-parallel ranks on the nodes: {_listed(nodes)}"
    elif sizes == {1}:
        reason = "leaves one data-parallel rank on each node, which has no effect"
    if reason:
        raise ConfigError(
            f"{_POINTER}: {ranks_per_node} {reason} (allowed: the number of ranks that the launcher starts on each "
            f"node). Write that, or remove the key hierarchy."
        )
    return nodes


def _listed(nodes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(len(node)) for node in nodes)
