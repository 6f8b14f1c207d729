"""Groups of our own over the ranks of an engine's group.

Messages of several models may be under way at once, and those of the engine beside them: in one group nothing would
tell them apart. Ranks outside know nothing of it, so only those inside take part.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.reduction import Groups
from deepspeed_compress.compression.state import Position
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.engine.nodes import ranks_per_node, split_by_node

__all__ = ["find_place_in", "make_groups"]


def make_groups(whole: ProcessGroup, config: CompressConfig) -> Groups:
    """Groups of the ranks of `whole`, divided by nodes if `config` has a hierarchy. All ranks of `whole` must call it.

    Raises ConfigError when the division is impossible or has no effect.
    """
    ranks, gloo = dist.get_process_group_ranks(whole), dist.get_backend(whole) == "gloo"
    nodes = _nodes(ranks, config)
    own = _made(ranks)
    if nodes is None:
        return Groups(own, downward=_made(ranks) if gloo and len(ranks) > 1 else None)
    node = next(_made(one) for one in nodes if dist.get_rank() in one)
    place = next(one for one in zip(*nodes, strict=True) if dist.get_rank() in one)
    return Groups(own, node, _made(place), _made(place) if gloo else None)


def find_place_in(whole: ProcessGroup, config: CompressConfig) -> Position:
    """Where this rank is in `whole`, which is all that its memories concern."""
    nodes = _nodes(dist.get_process_group_ranks(whole), config)
    return Position(whole.rank(), whole.size(), 0, 1, node_size=len(nodes[0]) if nodes else 1)


def _nodes(ranks: Sequence[int], config: CompressConfig) -> list[tuple[int, ...]] | None:
    on_node = ranks_per_node(config)
    return None if on_node is None else split_by_node(ranks, on_node, dist.get_world_size())


def _made(ranks: Sequence[int]) -> ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)  # type: ignore[no-any-return]
