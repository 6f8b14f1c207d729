"""Expansion of the section's parallelism into DeepSpeed's own keys, and its agreement with their values."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import layout_problems
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.problems import NATIVE_KEYS, STAGE, TENSOR, Configuration, raise_problems, value_at
from deepspeed_compress.config.section import find
from deepspeed_compress.diagnostics import pointer
from deepspeed_compress.errors import CompressWarning


def expand(ds_config: Mapping[str, Any], section: CompressConfig) -> dict[str, Any]:
    """Return a copy of `ds_config` with the section's parallelism in DeepSpeed's own keys.

    The section itself stays.

    Raises:
        ConfigError: if a value given in both places differs, if pipeline parallelism is combined with ZeRO stage 2 or
            3, or if a method contradicts the rest of the file (see `section.CHECKS`).
    """
    configuration = Configuration(section, ds_config)
    problems = [*find("parallelism", configuration), *find("file", configuration)]
    if problems:
        raise_problems(problems)
    expanded = copy.deepcopy(dict(ds_config))
    # DeepSpeed would treat a size of 1 as tensor parallelism, and a pipeline as a plain model.
    uses_autotp = configuration.parallelism.tensor > 1 and configuration.parallelism.pipeline == 1
    for native in NATIVE_KEYS:
        value = native.given(configuration.parallelism)
        if value is not None and (native is not TENSOR or uses_autotp):
            expanded.setdefault(native.section, {})[native.key] = value
    if _may_overlap(expanded, section):
        expanded["zero_optimization"].setdefault("overlap_comm", True)
    return expanded


def _may_overlap(ds_config: Mapping[str, Any], section: CompressConfig) -> bool:
    """Return True if DeepSpeed's streams can reduce during backward and every program stays correct.

    Not under ZeRO 1: there `overlap_comm` reduces only what the last micro-step has gradients of, each once.
    """
    zero, pipeline = ds_config.get("zero_optimization"), (section.parallelism or Parallelism()).pipeline
    return (
        section.gradients.method != "none"
        and isinstance(zero, dict)
        and STAGE.effective(ds_config, Parallelism()) == 2
        and zero.get("contiguous_gradients", True) is True
        and pipeline == 1
        and value_at(zero, ("offload_optimizer", "device")) in (None, "none")
        and ds_config.get("managed_gradient_accumulation", True) is True
    )


def check_world(section: CompressConfig, world_size: int, ds_config: Mapping[str, Any] | None = None) -> int:
    """Return the data-parallel size of `world_size` ranks.

    DeepSpeed's own tensor-parallel size in `ds_config` is used if the section gives none. Issues a CompressWarning if
    one rank remains, which has nothing to exchange.

    Raises:
        ConfigError: if tensor x pipeline does not divide `world_size`.
    """
    configuration = Configuration(section, ds_config or {}, world_size)
    parallelism, problems = configuration.parallelism, list(layout_problems.world_size(configuration))
    if problems:
        raise_problems(problems)
    size = world_size // (configuration.tensor * parallelism.pipeline)
    if section.islands is not None and section.islands.size is not None:
        size = section.islands.size
    if isinstance(parallelism.shard_within, int):
        # Only nodes exchange what the section compresses.
        size //= parallelism.shard_within
    for key in ("gradients", "weights"):
        if size == 1 and getattr(section, key).method != "none":
            text = f"{pointer((SECTION, key))}: compression has no effect, because the data-parallel size is 1"
            warnings.warn(f'{text}. Write "method": "none", or start more ranks.', CompressWarning, stacklevel=2)
    return size
