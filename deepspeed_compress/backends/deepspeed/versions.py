"""Adapters for what differs between the supported versions of DeepSpeed: one function for each difference.

Signatures that differ are listed in `seams`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import deepspeed
from deepspeed.checkpoint import constants
from deepspeed.module_inject import layers
from deepspeed.moe import sharded_moe
from packaging.version import Version


def _since(first: str) -> bool:
    """Return True if the installed DeepSpeed is `first` or newer. Previews and local builds count as their release."""
    return Version(deepspeed.__version__).release >= Version(first).release


def column_forwards() -> tuple[Callable[..., Any], ...]:
    """Return the forward methods of column-parallel layers. `SubParamLinearLayer` exists since 0.18.6."""
    return _forwards("LinearLayer", "SubParamLinearLayer")


def row_forwards() -> tuple[Callable[..., Any], ...]:
    """Return the forward methods of row-parallel layers. `SubParamLinearAllreduce` exists since 0.18.6."""
    return _forwards("LinearAllreduce", "SubParamLinearAllreduce")


def _forwards(*names: str) -> tuple[Callable[..., Any], ...]:
    return tuple(getattr(layers, name).forward for name in names if hasattr(layers, name))


def expert_exchanges() -> Mapping[Callable[..., Any], tuple[ModuleType, str]]:
    """Return, by the forward method of a layer of experts, the name and module of the function that exchanges tokens.

    AutoEP exists since 0.19.2.
    """
    found: dict[Callable[..., Any], tuple[ModuleType, str]] = {sharded_moe.MOELayer.forward: (sharded_moe, "_AllToAll")}
    if _since("0.19.2"):
        auto_ep = import_module("deepspeed.module_inject.auto_ep_layer")
        found[auto_ep.AutoEPMoELayer.forward] = (auto_ep, "_AllToAllV")
    return found


def has_compact_gradients(optimizer: Any) -> bool:
    """Return True if a ZeRO 2 optimizer keeps only this rank's partition of some group's gradients."""
    return any(is_compact(optimizer, group) for group in range(len(optimizer.bit16_groups)))


def is_compact(optimizer: Any, group: int) -> bool:
    """Return True if a ZeRO 1 or 2 optimizer adds the gradients of `group` up in this rank's partition (since 0.19.8).

    The others keep them in the parameters until the accumulation boundary.
    """
    return _since("0.19.8") and bool(optimizer._use_compact_grad_partition_buffer(group))


def is_last_micro_batch(optimizer: Any) -> bool:
    """Return True if a ZeRO optimizer is at an accumulation boundary.

    `is_gradient_accumulation_boundary` is an attribute before 0.19.5, and a method since.
    """
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if _since("0.19.5") else boundary)


def may_defer_reductions() -> bool:
    """Return True if reductions may finish once DeepSpeed has closed the last bucket of a backward pass (since 0.18.5).

    Before, calls for the last bucket look like those for the others, and ZeRO 3 ends a micro-step before the results
    would be handed over.
    """
    return _since("0.18.5")


def model_parallel_rank(engine: Any) -> int:
    """Return the tensor-parallel rank in the names of checkpoint files.

    Since 0.19.6, it is `checkpoint_mp_rank` of the engine. Before, its `_get_ckpt_name` asks `mpu`.
    """
    if _since("0.19.6"):
        return int(engine.checkpoint_mp_rank)
    return 0 if engine.mpu is None else int(engine.mpu.get_model_parallel_rank())


def orthogonalizes_in_step() -> bool:
    """Return True if Muon orthogonalizes the reduced gradients of a whole step, under each ZeRO stage, as since 0.19.8.

    Before, it does so while ZeRO 3 reduces a bucket, and a skipped step changes its momentum.
    """
    return _since("0.19.8")


def owns_parameter(parameter: Any) -> bool:
    """Return True if DeepSpeed's optimizers own `parameter` (`is_optimized_parameter`).

    Since 0.19.8, they leave out parameters without elements.
    """
    return bool(parameter.requires_grad) and (parameter.numel() > 0 or not _since("0.19.8"))


def runs_pipelines_without_zero() -> bool:
    """Return True if a pipeline may have another optimizer than those of ZeRO, as since 0.18.5.

    Before, an engine without them refuses `torch.autograd.backward`, which all stages but the last one call.
    """
    return _since("0.18.5")


def saves_without_copies() -> bool:
    """Return True if an engine saves without copying what shares memory, as background checkpoints do (since 0.18.4).

    Before, its `_save_checkpoint` reads a variable that it has not set.
    """
    return _since("0.18.4")


def skips_invalid_norms() -> bool:
    """Return True if DeepSpeed's own optimizers skip a step whose gradient norm is not finite, as since 0.19.8."""
    return _since("0.19.8")


def tensor_parallel_record(parameter: Any) -> Mapping[str, Any] | None:
    """Return what AutoTP records with a part of a weight for universal checkpoints; None for other parameters.

    DeepSpeed records it since 0.18.9 (`DS_AUTOTP_UC_META`).
    """
    return getattr(parameter, constants.DS_AUTOTP_UC_META, None) if _since("0.18.9") else None
