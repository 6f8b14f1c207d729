"""The section's `preset`: settings that are written into the section unless the file has them."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION, Parallelism
from deepspeed_compress.config.native import STAGE, value_at

_WEIGHT_BITS = {1: 4, 2: 4, 3: 8}
"""Bits of weights by ZeRO stage. Their losses have been measured: see `docs/results.md`."""
_OWN_GATHERS: Mapping[str, int] = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "stage3_use_all_reduce_for_fetch_params": False,
}
"""Keys of ZeRO 3 with which weights cannot be compressed, and the values that turn them off."""


def with_preset(ds_config: Mapping[str, Any]) -> Any:
    """Return the section of `ds_config` with the values of its preset, and without the key itself.

    A section that is no object, or has another preset than "auto", is returned as it is; validation reports it.
    """
    section = ds_config.get(SECTION)
    if not isinstance(section, Mapping) or section.get("preset") != "auto":
        return section
    written = {key: value for key, value in section.items() if key != "preset"}
    return {"auto": {}, "gradients": {"bits": 4}, **_weights(ds_config, written), **written}


def _weights(ds_config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of weights: none if this stage gathers none that can be compressed."""
    parallelism = section.get("parallelism")
    parallelism = parallelism if isinstance(parallelism, Mapping) else {}
    stage = parallelism.get("zero_stage")
    if not isinstance(stage, int):
        stage = STAGE.effective(ds_config, Parallelism())
    apart = parallelism.get("shard_within") or parallelism.get("pipeline", 1) != 1
    bits = None if apart or (stage == 3 and _gathers_itself(ds_config)) else _WEIGHT_BITS.get(stage)
    return {} if bits is None else {"weights": {"bits": bits}}


def _gathers_itself(ds_config: Mapping[str, Any]) -> bool:
    written = ((value_at(ds_config, ("zero_optimization", key)), off) for key, off in _OWN_GATHERS.items())
    return any(value not in (None, "auto", off) for value, off in written)
