"""Hugging Face causal language models from a config file or a local directory: whole, or a skeleton without memory."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from deepspeed_compress.config.names import HF_NAME, HF_TRANSPOSED
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import read_config

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def read_model_config(path: Path) -> PretrainedConfig:
    """Read a model's config from its JSON file or from a directory with a config.json.

    Raises:
        ConfigError: if the file cannot be read, or its `model_type` or another value is invalid.
    """
    file = path / "config.json" if path.is_dir() else path
    values = read_config(path)
    name = values.pop("model_type", None)
    if not isinstance(name, str):
        raise ConfigError(f'--model {file}: /model_type is {name!r}; write the family, for example "gpt2" or "llama"')
    try:
        return AutoConfig.for_model(name, **values)
    except Exception as error:  # transformers raises many types, some of huggingface_hub
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--model {file}: transformers rejects this config: {reason}") from None


def build_model(path: Path, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return the model in fp32, with the weights in the directory `path`, or with new ones drawn from `seed`.

    The same seed gives the same weights on every rank.

    Raises:
        ConfigError: if transformers has no causal language model of this family, or cannot load the weights.
    """
    torch.manual_seed(seed)
    try:
        model = _load(path) if has_weights(path) else _create(config)
    except ConfigError:
        raise
    except (ValueError, OSError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--model {path}: no causal language model can be built: {reason}") from None
    # Without a name, transformers uses the same loss but warns at the first step.
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    return model


def has_weights(path: Path) -> bool:
    """Return True if `path` is a directory with saved weights in the safetensors format.

    Raises:
        ConfigError: if the directory has weights that would be ignored, in another format or without their index.
    """
    if any((path / name).is_file() for name in WEIGHT_FILES):
        return True
    others = sorted(file.name for ending in ("safetensors", "bin") for file in path.glob(f"*model*.{ending}"))
    if others:
        raise ConfigError(
            f"--model {path}: has {others[0]}, but neither {' nor '.join(WEIGHT_FILES)}; copy the index as well, or "
            "save the model in the safetensors format"
        )
    return False


def _load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel
    model, found = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    if found["missing_keys"]:
        # transformers would initialize them randomly.
        raise ConfigError(
            f"--model {path}: no file contains the weight {min(found['missing_keys'])}; save the model again"
        )
    return model


def _create(config: PretrainedConfig) -> PreTrainedModel:
    build: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = build(config, dtype=torch.float32)
    return model


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
