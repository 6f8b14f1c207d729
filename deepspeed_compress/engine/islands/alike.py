"""What has to be alike in all islands beside the weights that they exchange, and an optimizer that can go on."""

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.engine.islands.division import IslandUnit
from deepspeed_compress.engine.islands.exchanged import matches
from deepspeed_compress.engine.weights.masters import FlatMasters
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.session.session import Session

__all__ = ["check_masters_alike", "digest_of", "fixed_parameters", "forget_not_finite", "share_fixed"]


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


def fixed_parameters(engine: Any, trained: Collection[str], own: Sequence[str]) -> list[Parameter]:
    """Those that islands neither train, `trained` being the names that some rank of the island has masters of, nor keep
    to themselves (`own`): frozen ones, and those that the optimizer was not given."""
    names = {id(parameter): name for parameter, name in engine.param_names.items()}
    return [
        parameter
        for name, parameter in engine.module.named_parameters()
        if names.get(id(parameter), name) not in trained and not matches(own, name)
    ]


def share_fixed(fixed: Sequence[Parameter], engine: Any, unit: IslandUnit) -> None:
    """What is not trained becomes that of the first island where it differs: nobody exchanges it. Collective."""
    if not fixed or unit.peers.size() == 1:
        return
    own = torch.stack([_fingerprint(_held(parameter)) for parameter in fixed]).to(engine.device)
    every = [torch.empty_like(own) for _ in range(unit.peers.size())]
    dist.all_gather(every, own, group=unit.peers)
    differs = torch.stack([(one != every[0]).any(1) for one in every]).any(0).tolist()
    changed = [parameter for parameter, differ in zip(fixed, differs, strict=True) if differ]
    for parameter in changed:
        values = _held(parameter).to(engine.device)
        dist.broadcast(values, dist.get_global_rank(unit.peers, 0), group=unit.peers)
        _held(parameter).copy_(values)
    # ZeRO 3 keeps small ones whole beside the parts.
    _renew([parameter for parameter in changed if getattr(parameter, "ds_persist", False)])


def digest_of(fixed: Sequence[Parameter]) -> str:
    """Of what this rank has of them, to the bit, whatever the device: whole numbers add up alike in every order."""
    digest = hashlib.sha256()
    for parameter in fixed:
        words = _held(parameter).contiguous().reshape(-1)
        words = words.view(_WORDS[words.element_size()])
        digest.update(f"{len(words)} {int(words.sum())} {int(words[::2].sum())} ".encode())
    return digest.hexdigest()


_WORDS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


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


def forget_not_finite(engine: Any, masters: FlatMasters, session: Session) -> None:
    """The island has diverged, and gets the weights of the others (CompressWarning). Without ZeRO its optimizer has
    stepped all the same, and what it and error feedback inside the island remember would undo them: elements of the
    optimizer that are not finite begin anew, and so do all memories. The same on all ranks of the island."""
    session.reset()
    for home in {id(one.home): one.home for one in masters.stepped}.values():
        for kept in engine.basic_optimizer.state.get(home, {}).values():
            if isinstance(kept, Tensor) and kept.is_floating_point() and not torch.isfinite(kept).all():
                kept.nan_to_num_(0.0, 0.0, 0.0)
    text = "this island has diverged: it goes on with the others' weights, its optimizer without what is not finite"
    warnings.warn(text, CompressWarning, stacklevel=2)
