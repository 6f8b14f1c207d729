"""Skeletons: causal LMs whose parameters have a shape and a name, but no memory yet."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from deepspeed_compress.config.names import HF_NAME, HF_TRANSPOSED


def build_skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of `config` in fp32 with named parameters on the meta device; buffers have their values."""
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        setattr(parameter, HF_NAME, name)
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _compute_buffers(module, model)
    return model


def _compute_buffers(module: nn.Module, model: Any) -> None:
    """Compute buffers that are not saved, such as rotary tables, the way transformers does after loading."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model._init_weights(module)


def linear_layers(model: nn.Module) -> None:
    """Replace the Conv1D modules of GPT-2 by Linear modules, which can be split; all on the meta device."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                setattr(module, name, _linear(child))


def _linear(layer: Any) -> nn.Linear:
    inputs, outputs = layer.weight.shape
    made = nn.Linear(inputs, outputs, device="meta")
    made.bias = layer.bias
    made.weight.__dict__.update(layer.weight.__dict__)
    setattr(made.weight, HF_TRANSPOSED, True)
    return made
