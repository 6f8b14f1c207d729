"""Slices of a model's parameters that a rank holds, for every way in which ranks share a model.

A rank holds whole parameters (a plain model, DDP, ZeRO 0 to 2, a pipeline stage), shards of them (ZeRO 3, FSDP2), or
the rows or columns that AutoTP gave it. Nothing is gathered: ranks that hold the same elements publish an even share
each (see `slices.find_shares`).
"""

import sys
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_compress.collectives.parameters import is_plain
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.model_families import HF_TRANSPOSED, user_name
from deepspeed_compress.rollout.slices import Slice, rectangle

_SPLIT = "ds_autotp_universal_checkpoint_meta"
"""Attribute with which AutoTP records how it has split a parameter (DS_AUTOTP_UC_META of DeepSpeed)."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module in a DeepSpeed engine or DistributedDataParallel.

    Raises:
        UnsupportedError: ranks of the engine hold different parts of the model, in an unknown way.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
        stages = model.module.num_stages if _is_pipeline(model.module) else 1
        tensor = max(getattr(layer, "tp_world_size", 1) for layer in model.module.modules())
        if model.seq_data_parallel_group.size() * stages * tensor != dist.get_world_size():
            raise UnsupportedError(
                "weights are published only if the data-parallel group has all ranks of the job, apart from pipeline "
                "stages and AutoTP (not with islands inside of one job, hybrid sharding, or other tensor parallelism)"
            )
    elif not isinstance(model, DistributedDataParallel):
        return model
    return unwrap(model.module)


def _is_pipeline(module: nn.Module) -> bool:
    """Return True for a PipelineModule of DeepSpeed, which is not imported for this."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(module, deepspeed.PipelineModule)


def find_held(module: nn.Module, names: Mapping[str, str], published: Container[str] | None = None) -> list[Slice]:
    """Return the slices of the model that this rank holds; other ranks may hold the same ones.

    They share memory with the model, so they have the values of the last optimizer step.

    Args:
        module: the user's module (see `unwrap`).
        names: names of its submodules in the plain model, if they differ (see `plain_name`).
        published: names of the parameters to publish; None for all.

    Raises:
        UnsupportedError: a parameter is shared among ranks in an unknown way, has no name in the plain model, or is not
            a floating-point tensor.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Only the shards are registered as parameters then.
            part.reshard()
    owners = {id(one): owner for owner in module.modules() for one in owner.parameters(recurse=False)}
    slices: list[Slice] = []
    for name, parameter in module.named_parameters():
        if published is None or name in published:
            slices += _held(_plain_name(module, parameter, name, names), parameter, owners[id(parameter)])
    return [one for one in slices if one.values.numel()]


def _plain_name(module: nn.Module, parameter: Any, name: str, names: Mapping[str, str]) -> str:
    """Return the name of a parameter in the plain model.

    Args:
        module: the model in training.
        parameter: the parameter. Models of the section `parallelism` record its name in transformers.
        name: its name in `module`.
        names: names in the plain model of submodules and parameters of `module`, as far as they differ.

    Raises:
        UnsupportedError: `module` is a pipeline, which numbers its layers, and nothing tells what they are called in
            the plain model.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = names.get(".".join(parts[:end]))
        if found is not None:
            return ".".join([found, *parts[end:]])
    known = user_name(parameter, "")
    if not known and _is_pipeline(module):
        raise UnsupportedError(
            f'parameter "{name}" of a pipeline has no known name in the plain model; pass the names of its layers to '
            f'Publisher, such as names={{"{parts[0]}": "model.layers.0"}}, or make the model by the key "parallelism"'
        )
    return known or name


def _held(name: str, parameter: Any, owner: Any) -> list[Slice]:
    """Return what this rank holds of a parameter of the layer `owner`."""
    _check_parameter(name, parameter)
    if isinstance(parameter, DTensor):
        return [_sharded(name, parameter)]
    if hasattr(parameter, "ds_tensor"):
        return [_zero_3(name, parameter)]
    return list(_rectangles(name, parameter, owner))


def _check_parameter(name: str, parameter: Any) -> None:
    if parameter.is_meta:
        raise UnsupportedError(f'parameter "{name}" is on the meta device, so it has no values to publish')
    if not parameter.is_floating_point():
        raise UnsupportedError(f'parameter "{name}" has the type {parameter.dtype}; only floating-point is published')
    if not is_plain(parameter.to_local() if isinstance(parameter, DTensor) else parameter):
        raise UnsupportedError(f'parameter "{name}" is quantized ({type(parameter).__name__}), and cannot be published')
    if getattr(parameter, "allreduce", True) is False:
        raise UnsupportedError(f'parameter "{name}" belongs to an expert, and ranks hold different ones of that name')
    if hasattr(parameter, "ds_optim_param") and parameter.dim() == 1:
        divided = f'parameter "{name}" is divided over the ranks by LoRAConfig of deepspeed.linear'
        raise UnsupportedError(f"{divided}; write base_weight_sharding=1 there")
    if getattr(parameter, "tensor_model_parallel", False) and not hasattr(parameter, _SPLIT):
        raise UnsupportedError(
            f'parameter "{name}" is split among ranks, and nothing tells how, as AutoTP does since DeepSpeed 0.19.6'
        )


def _rectangles(name: str, parameter: Any, owner: Any) -> Iterator[Slice]:
    """Yield this rank's part of a parameter: all of it, or what AutoTP gave this rank.

    Args:
        name: name of the parameter in the plain model.
        parameter: the parameter.
        owner: its layer.
    """
    record, part = getattr(parameter, _SPLIT, None), parameter.detach()
    if record is None or record["partition_dim"] is None:
        shape, pieces = tuple(part.shape), iter([(0, 0, _matrix(part))])
    else:
        shape, pieces = tuple(record["logical_shape"]), _pieces(name, part, record, owner.tp_index)
    for row, column, values in pieces:
        if getattr(parameter, HF_TRANSPOSED, False):
            yield rectangle(name, shape[::-1], column, row, values.t())
        else:
            yield rectangle(name, shape, row, column, values)


def _pieces(name: str, part: Tensor, record: Mapping[str, Any], index: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, first column, values) of what AutoTP gave to the rank `index` of a layer.

    A fused layer has several sub-parameters, and a rank has a part of each.
    """
    dim, sizes = record["partition_dim"], record.get("partition_sizes")
    subs = record.get("sub_param_shard_widths") or ([sizes] if sizes else [])
    if not subs or dim > 1 or (dim == 1 and part.dim() > 2):
        reason = record.get("unsupported_reason") or "DeepSpeed has recorded the sizes of parts since 0.19.6"
        raise UnsupportedError(f'the split of parameter "{name}" among tensor-parallel ranks is not known: {reason}')
    whole = own = 0
    for widths in subs:
        begin, width = whole + sum(widths[:index]), widths[index]
        values = part.narrow(dim, own, width)
        yield (begin, 0, _matrix(values)) if dim == 0 else (0, begin, values)
        whole, own = whole + sum(widths), own + width


def _matrix(part: Tensor) -> Tensor:
    """Return a tensor as a matrix of its first dimension by all others."""
    return part.reshape(part.shape[:1].numel(), part.shape[1:].numel())


def _zero_3(name: str, parameter: Any) -> Slice:
    """Return this rank's partition of a parameter under ZeRO 3, without its padding."""
    own, record = parameter.ds_tensor, getattr(parameter, _SPLIT, None)
    if own.status.name != "AVAILABLE" or not own.is_floating_point():
        problem = f'the partition of parameter "{name}" is on NVMe or quantized'
        raise UnsupportedError(f'{problem}; write "offload_param": {{"device": "cpu"}} at most')
    if getattr(parameter, HF_TRANSPOSED, False) or (record is not None and record["partition_dim"] is not None):
        raise UnsupportedError(f'parameter "{name}" is split by tensor parallelism, and again by ZeRO 3; use ZeRO 2')
    begin = parameter.ds_process_group.rank() * own.ds_numel
    values = own.detach().view(-1)[: max(0, parameter.ds_numel - begin)]
    return Slice(name, tuple(parameter.ds_shape), begin, 1, 0, values.view(1, -1))


def _sharded(name: str, parameter: DTensor) -> Slice:
    """Return this rank's rows of a parameter under FSDP2."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    sharding = [(dim, placement) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(sharding) > 1 or any(type(one) is not Shard or one.dim != 0 for _, one in sharding):
        problem = f'parameter "{name}" has the placements {parameter.placements}'
        raise UnsupportedError(f"{problem}; only Shard(0) in one dimension of the mesh is published")
    # torch.chunk divides rows: all shards but the last ones have so many. Of a whole copy, the first row is row 0.
    row = sum(-(-parameter.shape[0] // mesh.size(dim)) * coordinate[dim] for dim, _ in sharding)
    return rectangle(name, tuple(parameter.shape), row, 0, _matrix(parameter.to_local().detach()))
