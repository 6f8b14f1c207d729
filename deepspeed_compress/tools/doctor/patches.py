"""Changes of a configuration as JSON merge patches (RFC 7396), and the changes that remedies are made of."""

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.config.patches import merged
from deepspeed_compress.config.schedules import OWN_MOMENTUM

__all__ = ["accumulated", "apply", "difference", "slower", "with_gradients", "with_section", "with_stage"]


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes `new` of `old`. No value of `new` may be null, which would mean "remove"."""
    patch: dict[str, Any] = dict.fromkeys(sorted(old.keys() - new.keys()))
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            inside = difference(old[key], value)
            patch |= {key: inside} if inside else {}
        elif key not in old or old[key] != value:
            patch[key] = value
    return patch


def apply(target: object, patch: object) -> Any:
    """`target` with `patch` merged in, as RFC 7396 says: null removes a key, anything but an object replaces."""
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
    """`config` with a merge patch of our section."""
    merged_config: dict[str, Any] = apply(config, {SECTION: patch})
    return merged_config


def with_gradients(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with other settings of gradients, null for those to be left out: with another method without keys
    that are not its own, and with the optimizer's momentum where the former method had one in its place."""
    section = CompressConfig.model_validate(config[SECTION])
    removed = {key for key, value in patch.items() if value is None}
    if "method" not in config[SECTION].get("gradients", {}) and section.gradients.method == patch.get(
        "method", "blockwise"
    ):
        removed.add("method")
    written = {key: value for key, value in merged(section.gradients, patch).items() if key not in removed}
    result = copy.deepcopy(dict(config))
    result[SECTION] = {**result[SECTION], "gradients": written}
    if section.gradients.method in OWN_MOMENTUM and written.get("method") not in OWN_MOMENTUM:
        _restore_momentum(result)
    return result


def _restore_momentum(config: dict[str, Any]) -> None:
    """0.9, the usual one, where there is 0."""
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(params, dict):
        return
    betas = params.get("betas")
    if isinstance(betas, list | tuple) and betas and not betas[0]:
        params["betas"] = [0.9, *betas[1:]]
    if params.get("momentum") == 0:
        params["momentum"] = 0.9


def accumulated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`config` with twice the micro-batches in a step; None where the batch is chosen elsewhere ("auto")."""
    batch, steps = config.get("train_batch_size"), config.get("gradient_accumulation_steps")
    if "auto" in (batch, steps):
        return None
    patch = {} if batch is None else {"train_batch_size": 2 * batch}
    if steps is not None or batch is None:
        patch["gradient_accumulation_steps"] = 2 * (steps or 1)
    return {**config, **patch}


def with_stage(config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """`config` with another ZeRO stage, in each place that has one."""
    result = copy.deepcopy(dict(config))
    places = (result.get("zero_optimization"), "stage"), (result[SECTION].get("parallelism"), "zero_stage")
    for holder, key in places:
        if isinstance(holder, dict) and holder.get(key) is not None:
            holder[key] = stage
    return result


def slower(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`config` with half the learning rate; None where it has none."""
    result = copy.deepcopy(dict(config))
    changed = False
    for name, key in (("optimizer", "lr"), ("scheduler", "warmup_max_lr"), ("scheduler", "cycle_max_lr")):
        holder = result.get(name)
        params = holder.get("params") if isinstance(holder, dict) else None
        if isinstance(params, dict) and isinstance(params.get(key), int | float):
            params[key] /= 2
            changed = True
    return result if changed else None
