"""Weights for a module on the meta device: each rank keeps its own part of them."""

from typing import Any

import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import Tensor, nn

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.models.skeleton import SHAPE, TRANSPOSED
from deepspeed_compress.models.sources import Source
from deepspeed_compress.naming import HF_NAME

__all__ = ["fill"]


def fill(module: nn.Module, source: Source) -> None:
    """Give every parameter of `module` that is on the meta device its weight.

    One matrix at a time is whole: of a layer that DeepSpeed splits, the part of this rank is cut out at once. What is
    one parameter stays one. Raises ConfigError when a weight has another shape than the model's config says.
    """
    filled: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        empty = {name: p for name, p in owner.named_parameters(recurse=False) if p.is_meta}
        new = [parameter for parameter in empty.values() if id(parameter) not in filled]
        filled |= {id(parameter): _like(parameter, _whole(source, parameter)) for parameter in new}
        owner._parameters.update({name: filled[id(parameter)] for name, parameter in empty.items()})
        if new and isinstance(owner, TensorParallel_Layer):
            split: Any = owner
            split._tp_partition([split.weight, split.bias])


def _whole(source: Source, empty: Any) -> Tensor:
    found, wanted = source(getattr(empty, HF_NAME)), tuple(getattr(empty, SHAPE))
    if found.shape != wanted:
        raise ConfigError(
            f"--model: the weight {getattr(empty, HF_NAME)} has the shape {tuple(found.shape)}, the config says "
            f"{wanted}; use the config.json that was saved with it"
        )
    return found.t() if getattr(empty, TRANSPOSED, False) else found


def _like(empty: Any, value: Tensor) -> nn.Parameter:
    """`value` with everything that was noted on `empty`; a copy, since sources may share memory."""
    made = nn.Parameter(value.clone(memory_format=torch.contiguous_format), requires_grad=empty.requires_grad)
    made.__dict__.update(empty.__dict__)
    return made
