"""Configuration changes as JSON merge patches (RFC 7396), and the changes that remedies consist of.

`softer` and `stronger` start from the methods' own ladder (`MethodConfig.softer`). The guard takes small steps from
which it can return. A remedy should be sufficient at once, so sparse and low-rank methods take larger steps here.
"""

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, GradientsConfig, PowerSGDGradients, with_preset
from deepspeed_compress.config.methods import BlockwiseConfig, LinearConfig, PercentileConfig
from deepspeed_compress.config.places import NoneGradients
from deepspeed_compress.config.schedules import OWN_MOMENTUM, merged
from deepspeed_compress.config.sparse_methods import RandomKConfig, SparseConfig

Patch = dict[str, Any]

BLOCKS = frozenset({"blockwise", "linear", "stochastic_linear", "percentile", "fp8_e4m3", "fp8_e5m2", "sign", "qsgd"})
"""Methods that encode each block independently, in a single pass over memory."""
_FORGETFUL = frozenset({"sign", "topk", "block_topk", "randomk", "powersgd"})
_DENSE_ENOUGH = 0.1
"""With density d, gradients arrive about 1/d steps late: 10 steps here, over which Adam's first moment averages."""
_FOUR_BITS: Patch = {"method": "blockwise", "bits": 4}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that turns `old` into `new`.

    No value in `new` may be None, because a null in a merge patch removes the key.
    """
    patch: dict[str, Any] = dict.fromkeys(sorted(old.keys() - new.keys()))
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            inside = difference(old[key], value)
            patch |= {key: inside} if inside else {}
        elif key not in old or old[key] != value:
            patch[key] = value
    return patch


def apply(target: object, patch: object) -> Any:
    """Return `target` with `patch` merged in as in RFC 7396: null removes a key, objects are merged, others replace."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result: dict[str, Any] = copy.deepcopy(dict(target)) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply(result.get(key), value)
    return result


def with_section(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `patch` merged into the compression section."""
    merged_config: dict[str, Any] = apply(config, {SECTION: patch})
    return merged_config


def with_gradients(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `patch` applied to the gradient settings of the section. None removes a setting.

    If the method changes, keys that the new method does not have are removed, and with `none` those of the section that
    cannot be combined with it. If the old method kept a momentum of its own and the new one does not, the optimizer's
    momentum is restored.
    """
    section = CompressConfig.model_validate(with_preset(config))
    removed = {key for key, value in patch.items() if value is None}
    if "method" not in config[SECTION].get("gradients", {}) and section.gradients.method == patch.get(
        "method", "blockwise"
    ):
        removed.add("method")
    written = {key: value for key, value in merged(section.gradients, patch).items() if key not in removed}
    result = copy.deepcopy(dict(config))
    result[SECTION] = {**result[SECTION], "gradients": written}
    if written.get("method") == "none":
        result[SECTION] = _without_conflicts(with_preset(result))
    if section.gradients.method in OWN_MOMENTUM and written.get("method") not in OWN_MOMENTUM:
        _restore_momentum(result)
    return result


def _without_conflicts(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return `section`, whose gradients are uncompressed, without the keys that `config` refuses next to them."""
    refused = {"auto"}
    if section.get("weights", {"method": "none"}).get("method") == "none":
        refused |= {"ownership"} if section.get("islands") else {"ownership", "communication"}
    return {key: value for key, value in section.items() if key not in refused}


def _restore_momentum(config: dict[str, Any]) -> None:
    """Set the optimizer's momentum to the usual 0.9 wherever it is 0."""
    params = _params(config, "optimizer")
    betas = params.get("betas")
    if isinstance(betas, list | tuple) and betas and not betas[0]:
        params["betas"] = [0.9, *betas[1:]]
    if params.get("momentum") == 0:
        params["momentum"] = 0.9


def _params(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the parameters of the optimizer or the scheduler, or an empty dict if there are none."""
    holder = config.get(part)
    params = holder.get("params") if isinstance(holder, dict) else None
    return params if isinstance(params, dict) else {}


def accumulated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `config` with twice as many micro-batches per step, or None if a key of the batch is not an integer.

    From `train_batch_size` alone, DeepSpeed derives larger micro-batches, so the patch also sets the accumulation then.
    """
    batch, micro, steps = (config.get(key) for key in _BATCH)
    if not all(size is None or type(size) is int for size in (batch, micro, steps)):
        return None
    patch = {} if batch is None else {"train_batch_size": 2 * batch}
    if steps is not None or batch is None or micro is None:
        patch["gradient_accumulation_steps"] = 2 * (steps or 1)
    return {**config, **patch}


def with_stage(config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return `config` with another ZeRO stage, in each place that specifies one."""
    result = copy.deepcopy(dict(config))
    places = (result.get("zero_optimization"), "stage"), (result[SECTION].get("parallelism"), "zero_stage")
    for holder, key in places:
        if isinstance(holder, dict) and holder.get(key) is not None:
            holder[key] = stage
    return result


def slower(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `config` with half the learning rate, or None if it specifies none."""
    result = copy.deepcopy(dict(config))
    for part, key in (("optimizer", "lr"), ("scheduler", "warmup_max_lr"), ("scheduler", "cycle_max_lr")):
        params = _params(result, part)
        if isinstance(params.get(key), int | float):
            params[key] /= 2
    return result if result != config else None


def forgets(gradients: GradientsConfig) -> bool:
    """Return True if a method that sends only a small part of the gradient discards the rest for good."""
    if isinstance(gradients, NoneGradients) or (isinstance(gradients, RandomKConfig) and gradients.rescale):
        return False
    return gradients.method in _FORGETFUL and gradients.residuals is None


def softer(gradients: GradientsConfig) -> Patch | None:
    """Return the keys to change so that more of the gradient is sent, or None for method `none`."""
    if isinstance(gradients, NoneGradients):
        return None
    patch: Patch | None = gradients.softer()
    if isinstance(gradients, SparseConfig):
        patch = _FOUR_BITS if gradients.density >= _DENSE_ENOUGH else {"density": _DENSE_ENOUGH}
    elif isinstance(gradients, PowerSGDGradients):
        patch = {"rank": 4 * gradients.rank} if gradients.rank <= 16 else _FOUR_BITS
    return {**(patch or {"method": "none"}), **({"error_feedback": {}} if patch and forgets(gradients) else {})}


def stronger(gradients: GradientsConfig) -> Patch | None:
    """Return the keys to change for fewer bytes at little cost in loss, or None if fewer bytes would cost accuracy."""
    if gradients.method in ("none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        return {"method": "blockwise"}
    if isinstance(gradients, BlockwiseConfig | LinearConfig | PercentileConfig) and gradients.bits == 8:
        return {"bits": 4}
    return None
