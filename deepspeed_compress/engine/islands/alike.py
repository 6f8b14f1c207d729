"""What has to be alike in all islands beside the weights that they exchange, and an optimizer that can go on."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.engine.islands.division import IslandUnit
from deepspeed_compress.engine.weights.masters import FlatMasters
from deepspeed_compress.errors import CompressWarning, UnsupportedError

__all__ = ["check_masters_alike", "forget_not_finite", "share_frozen"]


def check_masters_alike(masters: FlatMasters, unit: IslandUnit) -> None:
    """UnsupportedError on all ranks unless ranks of equal place have the same elements. Collective."""
    own = (unit.place, tuple((one.parameter, one.begin, one.numel) for one in masters.stretches))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if len(set(every)) > len({place for place, _ in every}):
        raise UnsupportedError(
            "/deepspeed_compress/islands: DeepSpeed has divided the parameters over other ranks than those of an "
            "island, as deepspeed.zero.Init does over the whole job (allowed: within each island); make the model "
            "outside of it, or remove the key"
        )


def share_frozen(engine: Any, unit: IslandUnit) -> None:
    """What is not trained becomes that of the first island where it differs: nobody exchanges it. Collective."""
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    if not frozen or unit.peers.size() == 1:
        return
    own = torch.stack([_fingerprint(_held(parameter)) for parameter in frozen]).to(engine.device)
    every = [torch.empty_like(own) for _ in range(unit.peers.size())]
    dist.all_gather(every, own, group=unit.peers)
    differs = torch.stack([(one != every[0]).any(1) for one in every]).any(0).tolist()
    changed = [parameter for parameter, differ in zip(frozen, differs, strict=True) if differ]
    for parameter in changed:
        values = _held(parameter).to(engine.device)
        dist.broadcast(values, dist.get_global_rank(unit.peers, 0), group=unit.peers)
        _held(parameter).copy_(values)
    # ZeRO 3 keeps small ones whole beside the parts.
    _renew([parameter for parameter in changed if getattr(parameter, "ds_persist", False)])


def _held(parameter: Parameter) -> Tensor:
    """What this rank has of it: under ZeRO 3 a part."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def _fingerprint(values: Tensor) -> Tensor:
    """Two numbers, fp64, that differ where values do, but for what nobody meets by accident."""
    flat = values.reshape(-1) if values.is_floating_point() else values.reshape(-1).double()
    return torch.stack([flat.sum(dtype=torch.float64), torch.linalg.vector_norm(flat, dtype=torch.float64)])


def _renew(parameters: Sequence[Any]) -> None:
    if parameters:
        parameters[0].partition(parameters)
        parameters[0].all_gather(parameters)


def forget_not_finite(engine: Any, masters: FlatMasters) -> None:
    """The island has diverged, and gets the weights of the others (CompressWarning). Without ZeRO its optimizer has
    stepped all the same, and what it remembers would undo them: elements that are not finite begin anew."""
    for home in {id(one.home): one.home for one in masters.stepped}.values():
        for kept in engine.basic_optimizer.state.get(home, {}).values():
            if isinstance(kept, Tensor) and kept.is_floating_point() and not torch.isfinite(kept).all():
                kept.nan_to_num_(0.0, 0.0, 0.0)
    text = "this island has diverged: it goes on with the others' weights, its optimizer without what is not finite"
    warnings.warn(text, CompressWarning, stacklevel=2)
