"""Division of a job's ranks into islands or nodes: the groups that DeepSpeed is given (see `divided_calls`).

DeepSpeed divides ranks according to its `mpu` argument. Under AutoTP it uses its own groups instead, which it stores in
its module `groups`. Its tensor-parallel groups, of consecutive ranks, stay; the data-parallel group becomes that of the
island or node. Pipelines divide all ranks themselves.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Literal, TypeVar

import deepspeed
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.groups import downward_group, made_group
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError

SEAMS = (
    Seam("deepspeed.utils.groups:_init_tp_mesh_device", ("tensor_model_parallel_size", "data_parallel_size")),
    Seam("deepspeed.utils.groups:get_tensor_model_parallel_group", ()),
)

_ISLANDS, _NODES = IslandUnit.pointer, NodeUnit.pointer
_Unit = TypeVar("_Unit", IslandUnit, NodeUnit)


@dataclass(frozen=True)
class _Division:
    """Division of the job's ranks that the section asks for.

    Attributes:
        pointer: JSON pointer of the settings.
        parts: what a part is called in messages, in the plural.
        size: data-parallel ranks of a part; None for all ranks of a host.
        key: pointer of the key that gives the size.
    """

    pointer: str
    parts: str
    size: int | None
    key: str


def make_islands(settings: Islands, tensor: int = 1) -> IslandUnit:
    """Divide the ranks of the job into islands. Collective; initializes torch.distributed first if necessary.

    Args:
        settings: the section's `islands`.
        tensor: the number of ranks that share each layer.

    Raises:
        ConfigError: the ranks of the job cannot be divided in this way.
        UnsupportedError: this process already shares layers between other ranks.
    """
    key = f"{_ISLANDS}/{'by_host' if settings.by_host else 'size'}"
    unit = _divide(IslandUnit, _Division(_ISLANDS, "islands", None if settings.by_host else settings.size, key), tensor)
    if unit.count == 1 and settings.outer.optimizer == "average" and settings.outer.lr == 1.0:
        text = (
            f"{_ISLANDS}: has no effect, because all {len(unit.ranks)} ranks are one island; start more, or write "
            "smaller islands"
        )
        warnings.warn(text, CompressWarning, stacklevel=5)
    return unit


def make_nodes(shard_within: int | Literal["node"], tensor: int = 1) -> NodeUnit:
    """Divide the ranks of the job into nodes. Collective; initializes torch.distributed first if necessary.

    Args:
        shard_within: data-parallel ranks of a node; "node" for all ranks of a host.
        tensor: the number of ranks that share each layer.

    Raises:
        ConfigError: the ranks of the job cannot be divided in this way.
        UnsupportedError: this process already shares layers between other ranks.
    """
    size = None if shard_within == "node" else shard_within
    unit = _divide(NodeUnit, _Division(_NODES, "nodes", size, _NODES), tensor)
    if unit.count == 1:
        text = (
            f"{_NODES}: has no effect, because all {len(unit.ranks)} ranks are one node; remove the key, or start more"
        )
        warnings.warn(text, CompressWarning, stacklevel=5)
    return unit


def _divide(kind: type[_Unit], division: _Division, tensor: int) -> _Unit:
    """Make the groups of `division`, and return this rank's part."""
    if not dist.is_initialized():
        deepspeed.init_distributed()
    world, rank, size = dist.get_world_size(), dist.get_rank(), _ranks_of_part(division, tensor)
    if world % size:
        raise ConfigError(
            f"{division.key}: {division.parts} of {size} do not divide the {world} ranks of the job (allowed: "
            "divisors); start as many ranks for each"
        )
    parts = [tuple(range(first, first + size)) for first in range(0, world, size)]
    lines = [ranks[one::tensor] for ranks in parts for one in range(tensor)]
    places = list(zip(*parts, strict=True))
    whole = made_group(parts, division.pointer)
    return kind(
        ranks=parts[rank // size],
        number=rank // size,
        count=len(parts),
        tensor=tensor,
        whole=whole,
        data=whole if tensor == 1 else made_group(lines, division.pointer),
        model=_tensor_group(division, tensor),
        peers=made_group(places),
        downward=downward_group(places),
    )


def _ranks_of_part(division: _Division, tensor: int) -> int:
    """Return the number of ranks per part.

    The size of a division counts data-parallel ranks only. Without one, a part has all ranks of a host.
    """
    if division.size is not None:
        return division.size * tensor
    size = _ranks_of_host(division)
    if size % tensor:
        raise ConfigError(
            f"{division.key}: {tensor} ranks that share each layer do not divide the {size} ranks of a host (allowed: "
            "divisors); write such a number, or a number of ranks in place of the host"
        )
    return size


def _ranks_of_host(division: _Division) -> int:
    """Return the number of ranks per host, from the variables of torchrun or the deepspeed launcher. Collective.

    Raises:
        ConfigError: neither launcher was used, or hosts have unequal numbers of ranks. Raised on all ranks.
    """
    local = gather_objects(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", ""))
    if not all(local):
        raise ConfigError(
            f"{division.key}: this launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE (allowed: a number of ranks "
            f"in place of the host); write 8, for instance, if {division.parts} have 8 ranks"
        )
    sizes = sorted({int(size) for size in local})
    if len(sizes) > 1:
        raise ConfigError(
            f"{division.key}: hosts have {sizes} ranks (allowed: the same number on each); start the same number on "
            "every host, or write a number of ranks in place of the host"
        )
    return sizes[0]


def _tensor_group(division: _Division, tensor: int) -> ProcessGroup:
    """Return the group of ranks that share layers with this one."""
    if tensor == 1:
        return made_group([(one,) for one in range(dist.get_world_size())])
    # Layers that were split before an engine exists have already made these groups.
    groups._init_tp_mesh_device(tensor_model_parallel_size=tensor)
    found: ProcessGroup = groups.get_tensor_model_parallel_group()
    first = dist.get_rank() // tensor * tensor
    if dist.get_process_group_ranks(found) != list(range(first, first + tensor)):
        raise UnsupportedError(
            f"{division.pointer}: {tensor} ranks should share each layer, but DeepSpeed has groups of {found.size()} "
            "in this process (allowed: the same number); train with the other number in a separate process"
        )
    return found
