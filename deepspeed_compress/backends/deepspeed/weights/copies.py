"""Weights that ranks of equal place in their islands or nodes must have in common: checks and copies."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from deepspeed_compress.backends.deepspeed.units import RankUnit
from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights, gather_again
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import UnsupportedError


def check_equal_layouts(master_weights: FlatMasterWeights, unit: RankUnit) -> None:
    """Check that ranks of equal place in their islands or nodes hold the same elements. Collective.

    Raises:
        UnsupportedError: they do not. Raised on all ranks.
    """
    own = (unit.place, tuple((one.parameter, one.begin, one.numel) for one in master_weights.slices))
    every = gather_objects(own)
    if len(set(every)) > len({place for place, _ in every}):
        raise UnsupportedError(
            f"{unit.pointer}: DeepSpeed has divided the parameters over other ranks, as zero.Init does over the "
            "whole job (allowed: the same division); call "
            "deepspeed_compress.install() before the model is made, make it outside of zero.Init, or remove the key"
        )


def named_untrained(engine: Any, trained: Collection[str]) -> list[tuple[str, Parameter]]:
    """Return the named parameters that are frozen, or that the optimizer was not given.

    Args:
        engine: the engine.
        trained: the names of parameters of which some rank has master weights.
    """
    names = {id(parameter): name for parameter, name in engine.param_names.items()}
    named = engine.module.named_parameters()
    return [(name, parameter) for name, parameter in named if names.get(id(parameter), name) not in trained]


def copy_weights(parameters: Sequence[Parameter], device: torch.device, peers: ProcessGroup) -> None:
    """Copy the data of `parameters` of the first rank of `peers` to the others. Collective.

    All ranks of the job take part. Parameters that ranks need not have in common stay as they are.
    """
    common = [parameter for parameter in parameters if is_common(parameter)]
    copy_from_first([held_data(parameter) for parameter in common], device, peers)
    gather_again([parameter for parameter in common if getattr(parameter, "ds_persist", False)])


def is_common(parameter: Parameter) -> bool:
    """Return True if all data-parallel ranks must have the same values of `parameter`, if necessary in shards of ZeRO.

    Those are the parameters that DeepSpeed broadcasts when it makes an engine (`DeepSpeedEngine._broadcast_model`). It
    does not broadcast frozen weights of `deepspeed.linear.OptimizedLinear`, which `base_weight_sharding` divides over
    the ranks of the job, and broadcasts those of experts to the ranks with the same experts.
    """
    return not hasattr(parameter, "ds_optim_param") and not is_moe_param(parameter)


def copy_from_first(tensors: Sequence[Tensor], device: torch.device, peers: ProcessGroup) -> None:
    """Overwrite `tensors` with those of the first rank of `peers`. Collective."""
    for tensor in tensors if peers.size() > 1 else ():
        values = tensor.to(device, copy=True).contiguous()
        # Gloo and NCCL do not support every dtype, but both support bytes.
        dist.broadcast(bytes_of(values), dist.get_global_rank(peers, 0), group=peers)
        tensor.copy_(values)


def bytes_of(values: Tensor) -> Tensor:
    """Return a flat view of the bytes of `values`, which are contiguous."""
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def held_data(parameter: Any) -> Tensor:
    """Return this rank's data of `parameter`: under ZeRO 3, its partition without padding, which nobody writes."""
    part: Any = getattr(parameter, "ds_tensor", None)
    held: Tensor = (parameter if part is None else part).detach()
    if part is None:
        return held
    begin = part.ds_numel * parameter.ds_process_group.rank()
    return held.view(-1)[: max(0, parameter.ds_numel - begin)]
