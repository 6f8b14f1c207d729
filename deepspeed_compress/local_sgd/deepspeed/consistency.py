"""Checks and repairs for state that must be equal in all islands but is not exchanged, and recovery from divergence."""

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.backends.deepspeed.division import IslandUnit
from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import matches

__all__ = [
    "check_equal_layouts",
    "clear_non_finite",
    "copy_untrained_weights",
    "digest_parameters",
    "fingerprint",
    "recover_from_divergence",
    "untrained_parameters",
]


def check_equal_layouts(master_weights: FlatMasterWeights, unit: IslandUnit) -> None:
    """Check that ranks of equal place in their islands hold the same elements. Collective.

    Raises:
        UnsupportedError: they do not. Raised on all ranks.
    """
    own = (unit.place, tuple((one.parameter, one.begin, one.numel) for one in master_weights.slices))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if len(set(every)) > len({place for place, _ in every}):
        raise UnsupportedError(
            "/deepspeed_compress/islands: DeepSpeed has divided the parameters over other ranks than those of an "
            "island, as deepspeed.zero.Init does over the whole job (allowed: within each island); make the model "
            "outside of it, or remove the key"
        )


def untrained_parameters(engine: Any, trained: Collection[str], own: Sequence[str]) -> list[Parameter]:
    """Return the parameters that islands neither train nor keep to themselves.

    These are frozen parameters, and those that the optimizer was not given.

    Args:
        engine: the engine.
        trained: the names of parameters of which some rank of the island has master weights.
        own: the patterns of parameters that each island keeps to itself.
    """
    names = {id(parameter): name for parameter, name in engine.param_names.items()}
    return [
        parameter
        for name, parameter in engine.module.named_parameters()
        if names.get(id(parameter), name) not in trained and not matches(own, name)
    ]


def copy_untrained_weights(fixed: Sequence[Parameter], engine: Any, unit: IslandUnit) -> None:
    """Copy the untrained weights of the first island to the islands in which they differ. Collective.

    No exchange sends untrained weights.
    """
    if not fixed or unit.peers.size() == 1:
        return
    own = torch.stack([fingerprint(_held(parameter)) for parameter in fixed]).to(engine.device)
    every = [torch.empty_like(own) for _ in range(unit.peers.size())]
    dist.all_gather(every, own, group=unit.peers)
    differs = torch.stack([(one != every[0]).any(1) for one in every]).any(0).tolist()
    changed = [parameter for parameter, differ in zip(fixed, differs, strict=True) if differ]
    for parameter in changed:
        values = _held(parameter).to(engine.device, copy=True).contiguous()
        # Gloo and NCCL do not support every dtype, but both support bytes.
        dist.broadcast(_words(values, torch.uint8), dist.get_global_rank(unit.peers, 0), group=unit.peers)
        _held(parameter).copy_(values)
    # ZeRO 3 also keeps whole copies of small (persistent) parameters, which must be gathered again.
    _adopt_anchor([parameter for parameter in changed if getattr(parameter, "ds_persist", False)])


def digest_parameters(fixed: Sequence[Parameter]) -> str:
    """Return a digest of this rank's part of the parameters `fixed`: exact to the bit, and the same on every device."""
    digest = hashlib.sha256()
    for parameter in fixed:
        held = _held(parameter)
        digest.update(f"{held.dtype} {held.numel()} {fingerprint(held).tolist()} ".encode())
    return digest.hexdigest()


def fingerprint(values: Tensor) -> Tensor:
    """Return a fingerprint of the bytes of `values` and their order: int64, shape (2,).

    Different values have different fingerprints, except for collisions that do not occur by accident. The fingerprint
    is the same on every device. No arithmetic is done in the dtype of `values`.
    """
    found = torch.zeros(2, dtype=torch.int64, device=values.device)
    words = _words(values.contiguous(), _INTEGERS.get(values.element_size(), torch.uint8))
    for number, part in enumerate(torch.split(words, _PART)):
        # Integer arithmetic wraps around the same way everywhere, and sums do not depend on the order.
        places = torch.arange(len(part), device=part.device).add_(number * _PART + 1).mul_(_ODD)
        part = part.to(torch.int64)
        found += torch.stack([part.sum(), (part * places.bitwise_xor_(places >> 29)).sum()])
    return found


_INTEGERS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
)
"""Integer dtypes by the number of bytes per element."""
_PART = 1 << 20
"""Number of words summed at a time, which bounds the memory used."""
_ODD = 0x9E3779B97F4A7C1
"""Factor between the weights of neighboring words."""


def _words(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a flat view of the bytes of `values`, which are contiguous, as integers of `dtype`."""
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(dtype) if flat.numel() else flat.new_empty(0, dtype=dtype)


def _held(parameter: Parameter) -> Tensor:
    """Return this rank's data of `parameter`: under ZeRO 3, its partition."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def _adopt_anchor(parameters: Sequence[Any]) -> None:
    if parameters:
        parameters[0].partition(parameters)
        parameters[0].all_gather(parameters)


def clear_non_finite(values: Tensor) -> None:
    """Set elements of `values` that are not finite to 0, in place."""
    # One-byte dtypes do not support arithmetic.
    wide = values.float() if values.element_size() == 1 else values
    if not torch.isfinite(wide).all():
        values.copy_(wide.nan_to_num(0.0, 0.0, 0.0))


def recover_from_divergence(
    engine: Any, master_weights: FlatMasterWeights, clear_residuals: Callable[[], None]
) -> None:
    """Recover from a divergence of this island, which gets the weights of the others (CompressWarning).

    Without ZeRO, its optimizer has stepped nevertheless, and its state and the residuals inside the island would spoil
    the new weights. All residuals are cleared, and elements of the optimizer's state that are not finite are set to 0.
    The same on all ranks of the island.
    """
    clear_residuals()
    for home in {id(one.home): one.home for one in master_weights.stepped}.values():
        for kept in engine.basic_optimizer.state.get(home, {}).values():
            if isinstance(kept, Tensor) and kept.is_floating_point():
                clear_non_finite(kept)
    text = "this island has diverged: it continues with the weights of the others; non-finite optimizer states are 0"
    warnings.warn(text, CompressWarning, stacklevel=2)
