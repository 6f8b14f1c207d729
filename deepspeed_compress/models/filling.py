"""Filling of a module on the meta device with weights; each rank keeps its own part of them."""

from typing import Any

import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import Tensor, nn

from deepspeed_compress.config.names import HF_NAME, HF_TRANSPOSED
from deepspeed_compress.models.sources import Source


def fill(module: nn.Module, source: Source) -> None:
    """Load the weight of every parameter of `module` that is on the meta device.

    In addition to the filled parameters, at most one whole matrix is in memory at a time: this rank's part of a split
    layer is cut out at once. Shared parameters stay shared.
    """
    filled: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        split = isinstance(owner, TensorParallel_Layer)
        empty = {name: p for name, p in owner.named_parameters(recurse=False) if p.is_meta}
        new = [parameter for parameter in empty.values() if id(parameter) not in filled]
        filled |= {id(parameter): _like(parameter, _whole(source, parameter), copied=not split) for parameter in new}
        owner._parameters.update({name: filled[id(parameter)] for name, parameter in empty.items()})
        if new and split:
            _cut(owner)


def _cut(layer: Any) -> None:
    """Replace the parameters of `layer` by copies of this rank's part."""
    layer._tp_partition([layer.weight, layer.bias])
    for parameter in layer.parameters(recurse=False):
        parameter.data = parameter.data.contiguous()


def _whole(source: Source, empty: Any) -> Tensor:
    found = source(getattr(empty, HF_NAME))
    return found.t() if getattr(empty, HF_TRANSPOSED, False) else found


def _like(empty: Any, value: Tensor, copied: bool) -> nn.Parameter:
    """Return a parameter with `value` and all attributes of `empty`; `copied` if it must not share memory."""
    own = value.clone(memory_format=torch.contiguous_format) if copied else value
    made = nn.Parameter(own, requires_grad=empty.requires_grad)
    made.__dict__.update(empty.__dict__)
    return made
