"""Early check of the section, when a training framework reads a DeepSpeed configuration, before a model is loaded."""

import os
import warnings
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, check_world, expand, parse_section, with_preset
from deepspeed_compress.config.section import is_misspelled
from deepspeed_compress.errors import CompressWarning, UnsupportedError

_INSTEAD_OF_PIPELINE = (
    "To train the model as a pipeline, use launch/train_gpt.py, or deepspeed_compress.models.build_parallel, "
    "deepspeed_compress.initialize and engine.train_batch (docs/parallelism.md). Otherwise, use ZeRO or "
    '"tensor" instead of a pipeline.'
)


def has_section(ds_config: dict[str, Any]) -> bool:
    """Return True if `ds_config` has the section, or an obvious typo of it, or one inside another section."""
    return SECTION in ds_config or is_misspelled(ds_config)


def checked(ds_config: dict[str, Any], frameworks: str) -> tuple[dict[str, Any], CompressConfig]:
    """Return `ds_config` with the section's parallelism expanded into DeepSpeed's own keys, and the section.

    Frameworks read DeepSpeed's keys themselves. "auto" values outside the section stay. Warnings are left to the
    engine, which issues them once.

    Args:
        ds_config: DeepSpeed configuration with the section.
        frameworks: the training frameworks that read it, for error messages.

    Raises:
        ConfigError: if the section is invalid, or does not fit the number of ranks.
        UnsupportedError: if the section asks for pipeline parallelism.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        section = parse_section(ds_config)
        expanded = expand(ds_config, section)
        # Accelerate takes any "auto" for a value that it must fill in.
        expanded[SECTION] = with_preset(expanded)
        if "WORLD_SIZE" in os.environ:
            check_world(section, int(os.environ["WORLD_SIZE"]), expanded)
    if section.parallelism is not None and section.parallelism.pipeline > 1:
        raise UnsupportedError(
            f"/{SECTION}/parallelism/pipeline: {section.parallelism.pipeline} is not possible with {frameworks}, which "
            f"run the model's forward and backward themselves (allowed: 1). {_INSTEAD_OF_PIPELINE}"
        )
    return expanded, section
