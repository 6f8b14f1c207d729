"""LoRA adapters of PEFT: which parameters of a model are published, and under which names.

An engine knows no name of PEFT. It gets either the adapter alone, as PEFT saves it, which it loads next to its own copy
of the base; or merged weights, under the names of the base.

Source: `LoraLayer` and `get_peft_model_state_dict` of PEFT 0.21.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.rollout.parts import Record

AdapterForm = Literal["alone", "merged"]
"""Published part of an adapted model: the adapter, or the weights that result from it."""

_PREFIX = "base_model.model."
"""Beginning of all names in a PeftModel, and in the files of PEFT."""
_REPLACED = re.compile(r"\.original_module\.|\.lora_\w+\.|\.modules_to_save\.")
"""Names of adapters, of inactive copies, and of weights that a copy replaces."""
_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Initializations that leave the base as it is. Others subtract the new adapter from it."""


class AdapterConfig(Record):
    """Settings of an adapter, with the names of PEFT's `adapter_config.json`. Those of its training are left out."""

    peft_type: Literal["LORA"] = "LORA"
    task_type: str | None
    inference_mode: Literal[True] = True
    base_model_name_or_path: str | None
    r: Annotated[int, Field(ge=1)]
    lora_alpha: int | float
    use_rslora: bool
    fan_in_fan_out: bool
    bias: Literal["none"] = "none"
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: int | tuple[int, ...] | None
    layers_pattern: str | tuple[str, ...] | None

    @property
    def scaling(self) -> float:
        """Return the factor of the product of the two matrices."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(frozen=True)
class Adapter:
    """Active adapter of a model, as it is published.

    Attributes:
        name: its name in PEFT.
        names: published name of each published parameter.
        config: its settings, if it is published alone.
        layers: layers of which it changes the weight, by the published name of that, if it is merged.
    """

    name: str
    names: Mapping[str, str]
    config: AdapterConfig | None
    layers: Mapping[str, Any]

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is added to each merged weight, as PEFT computes it. Collective under ZeRO 3.

        No weight of the base is gathered for this.
        """
        for weight, layer in self.layers.items():
            factors = [one for name, one in layer.named_parameters() if name.startswith("lora_")]
            with torch.no_grad(), _gathered(factors):
                yield weight, layer.get_delta_weight(self.name)


def find_adapter(module: nn.Module, form: AdapterForm) -> Adapter:
    """Return the active LoRA adapter of a model.

    Args:
        module: a `PeftModel`, or a model of transformers with an adapter.
        form: what of it is published.

    Raises:
        UnsupportedError: there is none, or an engine would not compute with it what the model does.
    """
    layers = _find_layers(module)
    name = _check_layers(layers)
    prefix = _PREFIX if any(one.startswith(_PREFIX) for one in layers) else ""
    if form == "merged":
        weights = {_base_name(f"{one}.base_layer.weight", name, prefix): layer for one, layer in layers.items()}
        _check_mergeable(module, layers, name)
        names = {one: _base_name(one, name, prefix) for one, _ in module.named_parameters()}
        kept = {one: base for one, base in names.items() if not _REPLACED.search(base)}
        return Adapter(name, kept, None, weights)
    config, own = _read_config(module, name), _own_names(module, name, prefix)
    _check_alone(module, layers, name, own, config)
    return Adapter(name, own, config, {})


def _find_layers(module: nn.Module) -> Mapping[str, Any]:
    """Return the layers with an active adapter."""
    found = {}
    if isinstance(getattr(module, "peft_config", None), dict):
        from peft.tuners.lora import LoraLayer

        for name, layer in module.named_modules():
            if isinstance(layer, LoraLayer) and {*layer.active_adapters} & {*layer.scaling}:
                found[name] = layer
    if not found:
        raise UnsupportedError(f'{type(module).__name__} has no active LoRA adapter of PEFT: leave "adapters" out')
    return found


def _check_layers(layers: Mapping[str, Any]) -> str:
    """Return the name of the only active adapter.

    Raises:
        UnsupportedError: there are several, or one does more than to add a product of two matrices.
    """
    names: set[str] = {name for layer in layers.values() for name in layer.active_adapters if name in layer.scaling}
    if len(names) > 1:
        raise UnsupportedError(f"several adapters are active ({', '.join(sorted(names))}), but one is published")
    name = names.pop()
    for place, layer in layers.items():
        problems = {
            f"it is the variant {type(layer.lora_variant.get(name)).__name__} of LoRA": name in layer.lora_variant,
            "it has biases of its own (lora_bias)": layer.lora_bias.get(name),
            "it is merged into the base already; call unmerge_adapter()": layer.merged,
        }
        for problem in (text for text, holds in problems.items() if holds):
            raise UnsupportedError(f'the adapter of "{place}" cannot be published: {problem}')
    return name


def _check_mergeable(module: Any, layers: Mapping[str, Any], adapter: str) -> None:
    """Check that the sum of a weight and its change can be published.

    Raises:
        UnsupportedError: a layer is quantized, divided, or of another kind, or a weight is that of another layer too.
    """
    from peft.tuners.lora.layer import Embedding, Linear
    from transformers.pytorch_utils import Conv1D

    if module.peft_config[adapter].trainable_token_indices is not None:
        raise UnsupportedError("adapters with trainable_token_indices are not published")

    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for place, layer in layers.items():
        base = layer.get_base_layer()
        if type(layer) not in (Linear, Embedding) or type(base) not in (nn.Linear, nn.Embedding, Conv1D):
            kind = f"{type(base).__module__}.{type(base).__name__}"
            raise UnsupportedError(f'"{place}" is a {kind}, into which no adapter is merged; publish it "alone"')
        others = [one for one in owners[id(base.weight)] if one != f"{place}.base_layer.weight"]
        if others:
            tied = f'the weight of "{place}" is that of "{others[0]}" too, which its adapter does not change'
            raise UnsupportedError(f'{tied}; publish it "alone", or tie no weights')
        if hasattr(base.weight, "device_mesh"):
            raise UnsupportedError('adapters under FSDP2 are published "alone", but not merged')


def _check_alone(
    module: nn.Module, layers: Mapping[str, Any], adapter: str, names: Mapping[str, str], config: AdapterConfig
) -> None:
    """Check that the adapter and the base that an engine has are the whole model.

    Raises:
        UnsupportedError: something else is trained too, or layers have different factors, but engines have one.
    """
    trained = [name for name, one in module.named_parameters() if one.requires_grad and name not in names]
    if trained:
        raise UnsupportedError(f'"{trained[0]}" is trained, but is no part of the adapter; publish it "merged"')
    for place, layer in layers.items():
        if not math.isclose(layer.scaling[adapter], config.scaling):
            other = f'the adapter of "{place}" is multiplied by {layer.scaling[adapter]:g}'
            raise UnsupportedError(f'{other}, but engines by {config.scaling:g} in all layers; publish it "merged"')


def _read_config(module: Any, adapter: str) -> AdapterConfig:
    """Return the settings of an adapter.

    Raises:
        UnsupportedError: its initialization has changed the base.
    """
    config = module.peft_config[adapter]
    if config.init_lora_weights not in _KEEPS_BASE:
        initialization = f"init_lora_weights={config.init_lora_weights!r}"
        raise UnsupportedError(f'{initialization} has changed the base, which engines do not; publish it "merged"')
    fields = AdapterConfig.model_fields.keys() - {"peft_type", "inference_mode", "bias"}
    found = {name: _as_data(getattr(config, name)) for name in fields}
    base = found["base_model_name_or_path"] or getattr(module, "name_or_path", None) or None
    return AdapterConfig(**found | {"base_model_name_or_path": base})


def _as_data(value: Any) -> Any:
    """Return a setting of PEFT as plain data, in an order that does not depend on hashes."""
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    return getattr(value, "value", value)


def _own_names(module: nn.Module, adapter: str, prefix: str) -> Mapping[str, str]:
    """Return the parameters of an adapter, with the names that PEFT saves."""
    ending = re.compile(rf"\.(lora_\w+)\.{re.escape(adapter)}(\.weight)?$")
    names = (name for name, _ in module.named_parameters() if ending.search(name))
    return {name: _PREFIX + ending.sub(r".\1\2", name.removeprefix(prefix)) for name in names}


def _base_name(name: str, adapter: str, prefix: str) -> str:
    """Return the name in the base of a parameter of the adapted model."""
    name = name.removeprefix(prefix).replace(".base_layer.", ".")
    return name.replace(f".modules_to_save.{adapter}.", ".")


def _gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO 3 divides are whole."""
    if not any(hasattr(one, "ds_id") for one in parameters):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return gathered
