"""Check of the section when Accelerate reads a DeepSpeed configuration, before a model is loaded.

`TrainingArguments`, `DeepSpeedPlugin` and `HfDeepSpeedConfig` all call
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: once after the file has been read, and again after
"auto" values have been filled in from the training arguments.
"""

import difflib
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from deepspeed_compress.config import SECTION, check_world, expand, parse_section
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.integrations.importing import Undo
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["check_early"]


def check_early(on_section: Callable[[], Undo]) -> Undo:
    """Check and expand the section of every configuration that is read from now on.

    Args:
        on_section: called whenever a configuration has the section. It returns a function that undoes its effect.

    Returns:
        A function that undoes everything.
    """
    undo = ExitStack()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_stage_and_offload(self: Any) -> None:
            if _has_section(self.config):
                self.config = checked(self.config)
                undo.callback(on_section())
            original(self)

        return set_stage_and_offload

    undo.callback(replace_method(HfDeepSpeedConfig, "set_stage_and_offload", wrap))
    return undo.close


def checked(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return `ds_config` with the section's parallelism expanded into DeepSpeed's own keys, which Accelerate reads.

    "auto" values outside the section stay. Warnings are left to the engine, which issues them once.

    Raises:
        ConfigError: if the section is invalid, or does not fit the number of ranks.
        UnsupportedError: if the section asks for pipeline parallelism.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        section = parse_section(ds_config)
        expanded = expand(ds_config, section)
        if "WORLD_SIZE" in os.environ:
            check_world(section, int(os.environ["WORLD_SIZE"]), expanded)
    if section.parallelism is not None and section.parallelism.pipeline > 1:
        raise UnsupportedError(
            f"/{SECTION}/parallelism/pipeline: {section.parallelism.pipeline} is not possible with Trainer or "
            f"Accelerate, which run the model's forward and backward themselves (allowed: 1). {INSTEAD_OF_PIPELINE}"
        )
    return expanded


INSTEAD_OF_PIPELINE = (
    "To train the model as a pipeline, use launch/train_gpt.py, or deepspeed_compress.models.build_parallel, "
    "deepspeed_compress.initialize and engine.train_batch (docs/parallelism.md). Otherwise, use ZeRO or "
    '"tensor" instead of a pipeline.'
)


def _has_section(ds_config: dict[str, Any]) -> bool:
    """Return True if `ds_config` has the section, or a key that is almost certainly a typo of its name."""
    return SECTION in ds_config or bool(difflib.get_close_matches(SECTION, map(str, ds_config), n=1, cutoff=0.8))
