"""Slices of a model's parameters that this rank publishes, for every way in which ranks share a model.

Each element of each parameter is published by exactly one rank, from where it already lies:

- Parameters that every rank holds (a plain model, DDP, ZeRO 0 to 2) are cut into one contiguous share per rank.
- With ZeRO 3 and FSDP2, each rank publishes its own shard, so no rank gathers the model. If several groups of ranks
  hold the same shards, the first group publishes.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.errors import UnsupportedError

__all__ = ["Slice", "find_slices", "unwrap"]

_MAX_NUMEL = 1 << 24
"""Largest number of elements of a slice. It bounds the memory that a receiver needs in addition to its model."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A slice of a parameter that this rank publishes.

    Attributes:
        name: name of the parameter in the model.
        shape: shape of the whole parameter.
        start: first element, in the flattened parameter.
        values: the elements as a flat tensor, in the type and on the device of training.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module in a DeepSpeed engine or DistributedDataParallel.

    Raises:
        UnsupportedError: ranks of the engine hold different parts of the model, other than by ZeRO.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
        _check_engine(model)
    elif not isinstance(model, DistributedDataParallel):
        return model
    return unwrap(model.module)


def _check_engine(engine: Any) -> None:
    if engine.seq_data_parallel_group.size() != dist.get_world_size():
        raise UnsupportedError(
            "weights are published only if the data-parallel group has all ranks of the job (not with pipeline stages, "
            "tensor parallelism, islands inside of one job, or hybrid sharding)"
        )


def find_slices(module: nn.Module, rank: int, ranks: int) -> list[Slice]:
    """Return the slices that this rank publishes, none longer than 2**24 elements.

    They share memory with the model, so they have the values of the last optimizer step.

    Args:
        module: the user's module (see `unwrap`).
        rank: index of this rank among the publishing ones.
        ranks: number of publishing ranks.

    Raises:
        UnsupportedError: a parameter is shared among ranks in an unknown way, or is not a floating-point tensor.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Only the shards are registered as parameters then.
            part.reshard()
    found: list[Slice] = []
    replicated: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
        if hasattr(parameter, "ds_tensor"):
            found += _zero_3(name, parameter)
        elif isinstance(parameter, DTensor):
            found += _sharded(name, parameter)
        else:
            replicated[name] = parameter.detach()
    return [piece for one in (*found, *_shares(replicated, rank, ranks)) for piece in _pieces(one)]


def _check_parameter(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        raise UnsupportedError(f'parameter "{name}" has the type {parameter.dtype}; only floating-point is published')
    if getattr(parameter, "allreduce", True) is False:
        raise UnsupportedError(f'parameter "{name}" belongs to an expert, and ranks hold different ones of that name')


def _shares(parameters: dict[str, Tensor], rank: int, ranks: int) -> Iterator[Slice]:
    """Yield this rank's share of parameters that every rank holds."""
    partition = even_partition([(name, one.numel()) for name, one in parameters.items()], ranks)
    for part in partition.owned_by(rank):
        whole = parameters[part.parameter]
        yield Slice(part.parameter, tuple(whole.shape), part.begin, whole.reshape(-1).narrow(0, part.begin, part.numel))


def _zero_3(name: str, parameter: Any) -> Iterator[Slice]:
    """Yield this rank's partition under ZeRO 3, without its padding."""
    own = parameter.ds_tensor
    if own.status.name != "AVAILABLE" or not own.is_floating_point():
        raise UnsupportedError(
            f'the partition of parameter "{name}" is on NVMe or quantized, and cannot be published; write '
            '"offload_param": {"device": "cpu"} at most'
        )
    group = parameter.ds_process_group
    start = group.rank() * own.ds_numel
    numel = min(own.ds_numel, parameter.ds_numel - start)
    if numel > 0 and 0 in dist.get_process_group_ranks(group):
        yield Slice(name, tuple(parameter.ds_shape), start, own.detach().view(-1).narrow(0, 0, numel))


def _sharded(name: str, parameter: DTensor) -> Iterator[Slice]:
    """Yield this rank's rows of a parameter under FSDP2."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    sharding = [(dim, one) for dim, one in enumerate(parameter.placements) if not one.is_replicate()]
    if len(sharding) > 1 or any(type(one) is not Shard or one.dim != 0 for _, one in sharding):
        raise UnsupportedError(
            f'parameter "{name}" has the placements {parameter.placements}; only Shard(0) in one dimension of the mesh '
            "is published"
        )
    local = parameter.to_local().detach()
    shard_dim = sharding[0][0] if sharding else None
    copy = [place for dim, place in enumerate(coordinate) if dim != shard_dim]
    if local.numel() and not any(copy):
        rows = 0 if shard_dim is None else _first_row(parameter.shape[0], mesh.size(shard_dim), coordinate[shard_dim])
        row_numel = math.prod(parameter.shape[1:])
        yield Slice(name, tuple(parameter.shape), rows * row_numel, local.reshape(-1))


def _first_row(rows: int, shards: int, index: int) -> int:
    """Return the first row of a shard, as torch.chunk divides rows."""
    return -(-rows // shards) * index


def _pieces(one: Slice) -> Iterator[Slice]:
    """Yield the pieces of a slice that is too long."""
    for begin in range(0, one.values.numel(), _MAX_NUMEL):
        numel = min(_MAX_NUMEL, one.values.numel() - begin)
        yield Slice(one.name, one.shape, one.start + begin, one.values.narrow(0, begin, numel))
