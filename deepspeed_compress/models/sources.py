"""Hugging Face causal LMs from a config file or a local directory: whole, as a skeleton, or one tensor at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import HF_NAME, HF_TRANSPOSED, read_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of weights: a single one, or the index of several."""


def read_model_config(path: Path) -> PretrainedConfig:
    """Read a model's config from its JSON file or from a directory with a config.json.

    Raises:
        ConfigError: if the file cannot be read.
    """
    values = read_config(path)
    return AutoConfig.for_model(values.pop("model_type", None), **values)


def build_model(path: Path, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return the model in fp32, with the weights in the directory `path`, or with new ones drawn from `seed`.

    The same seed gives the same weights on every rank.
    """
    torch.manual_seed(seed)
    model = _load(path) if has_weights(path) else _create(config)
    # Without a name, transformers uses the same loss but warns at the first step.
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    return model


def has_weights(path: Path) -> bool:
    """Return True if `path` is a directory with saved weights in the safetensors format.

    Raises:
        ConfigError: if the directory has weights that would be ignored, in another format or without their index.
    """
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return True
    others = sorted(file.name for ending in ("safetensors", "bin") for file in path.glob(f"*model*.{ending}"))
    if others:
        raise ConfigError(
            f"--model {path}: has {others[0]}, but neither {SINGLE} nor {INDEX}; copy the index as well, or "
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
    with torch.device("meta"):
        model = _create(config)
    for name, parameter in model.named_parameters():
        setattr(parameter, HF_NAME, name)
    for module in model.modules():
        # Compute buffers that are not saved, such as rotary tables, the way transformers does after loading.
        buffers = dict(module.named_buffers(recurse=False))
        if any(buffer.is_meta for buffer in buffers.values()):
            module._buffers.update({name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers.items()})
            model._init_weights(module)
    return model


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


Source = Callable[[str], Tensor]
"""Function from the name of a parameter in the transformers causal LM to its whole tensor, in fp32 on the CPU."""

_SAVED_PREFIXES: Mapping[str, tuple[str, str]] = {"gpt_neox": ("lm_head.", "embed_out.")}
"""Prefixes that differ between a model and its files, by model_type: (prefix in the model, prefix in files)."""


def open_source(path: Path, skeleton: Any, seed: int) -> Source:
    """Return the source of the weights of `skeleton`: the directory `path`, or new weights drawn from `seed`.

    Saved tensors are read on demand. New weights equal those of a single process with this `seed`; they exist whole on
    every rank until the source is deleted.

    Raises:
        ConfigError: if no file contains a tensor. All ranks look for all tensors.
    """
    if has_weights(path):
        shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        return _Saved(path, skeleton.config, shapes)
    weights: dict[str, Tensor] = build_model(path, skeleton.config, seed).state_dict()
    return weights.__getitem__


class _Saved:
    """Weights in a directory that transformers' save_pretrained has written."""

    def __init__(self, directory: Path, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.file_of, self.shapes = _files(directory), shapes
        self.keys = {name: self._key(directory, name, config) for name in shapes}

    def __call__(self, name: str) -> Tensor:
        key = self.keys[name]
        with safe_open(self.file_of[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        if tuple(tensor.shape) != self.shapes[name]:
            raise ConfigError(
                f"--model: the weight {name} has shape {tuple(tensor.shape)}, but the config implies "
                f"{self.shapes[name]}; use the config.json that was saved with the weights"
            )
        return tensor.to(torch.float32)

    def _key(self, directory: Path, name: str, config: PretrainedConfig) -> str:
        # A model that was saved without its head has names relative to the backbone.
        names = (saved_name(name, config), name, name.partition(".")[2])
        found = next((key for key in names if key in self.file_of), None)
        if found is None:
            raise ConfigError(f"--model {directory}: no file contains the weight {name}; save the model again")
        return found


def saved_name(name: str, config: PretrainedConfig) -> str:
    """Return the name that transformers uses in files for the parameter `name` of a model of `config`."""
    in_model, in_files = _SAVED_PREFIXES.get(config.model_type, ("", ""))
    return in_files + name.removeprefix(in_model) if name.startswith(in_model) else name


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    if (directory / SINGLE).is_file():
        with safe_open(directory / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / SINGLE)
    named = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return {name: directory / file for name, file in named.items()}


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
        filled |= {id(parameter): _filled(parameter, source, copied=not split) for parameter in new}
        owner._parameters.update({name: filled[id(parameter)] for name, parameter in empty.items()})
        if new and split:
            _cut(owner)


def _cut(layer: Any) -> None:
    """Replace the parameters of `layer` by copies of this rank's part."""
    layer._tp_partition([layer.weight, layer.bias])
    for parameter in layer.parameters(recurse=False):
        parameter.data = parameter.data.contiguous()


def _filled(empty: Any, source: Source, copied: bool) -> nn.Parameter:
    """Return a parameter with its whole value and all attributes of `empty`; `copied` if it must not share memory."""
    value = source(getattr(empty, HF_NAME))
    value = value.t() if getattr(empty, HF_TRANSPOSED, False) else value
    own = value.clone(memory_format=torch.contiguous_format) if copied else value
    made = nn.Parameter(own, requires_grad=empty.requires_grad)
    made.__dict__.update(empty.__dict__)
    return made
