"""The section is checked where Accelerate reads a DeepSpeed configuration: before a model is loaded.

`TrainingArguments`, `DeepSpeedPlugin` and the `HfDeepSpeedConfig` of scripts all go through one method,
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: when the file has been read, and again when the
values that were "auto" are filled in from the training arguments.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from deepspeed_compress.config import SECTION, check_world, expand, parse_section
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["check_early"]


def check_early() -> Callable[[], None]:
    """Check and expand the section of every configuration that is read from now on, and follow the Trainers that use
    one; returns what undoes it."""
    undo: list[Callable[[], None]] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_stage_and_offload(self: Any) -> None:
            if _meant(self.config):
                self.config = checked(self.config)
                undo.extend(_follow_trainers())
            original(self)

        return set_stage_and_offload

    undo.append(replace_method(HfDeepSpeedConfig, "set_stage_and_offload", wrap))

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


def checked(ds_config: dict[str, Any]) -> dict[str, Any]:
    """`ds_config` with the section's parallelism in DeepSpeed's own keys, where these libraries look for it.

    "auto" outside the section stays. Raises ConfigError as `expand` and `check_world` do, and UnsupportedError for a
    pipeline. Warnings are left to the engine, which gives them once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        section = parse_section(ds_config)
        expanded = expand(ds_config, section)
        if "WORLD_SIZE" in os.environ:
            check_world(section, int(os.environ["WORLD_SIZE"]), expanded)
    if section.parallelism is not None and section.parallelism.pipeline > 1:
        raise UnsupportedError(
            f"/{SECTION}/parallelism/pipeline: {section.parallelism.pipeline} is not possible under Trainer and "
            f"Accelerate, which run the layers of a model themselves (allowed: 1). {INSTEAD_OF_PIPELINE}"
        )
    return expanded


INSTEAD_OF_PIPELINE = (
    "Train the same model in stages with launch/train_gpt.py, or with deepspeed_compress.models.build_parallel, "
    "deepspeed_compress.initialize and engine.train_batch (docs/parallelism.md); or write ZeRO or "
    '"tensor" instead of a pipeline.'
)


def _meant(ds_config: dict[str, Any]) -> bool:
    """Whether the section is there, or something that is hardly anything else."""
    return SECTION in ds_config or bool(difflib.get_close_matches(SECTION, map(str, ds_config), n=1, cutoff=0.8))


def _follow_trainers() -> list[Callable[[], None]]:
    """Whoever makes a Trainer has made its arguments before; others need not wait for the import."""
    if "transformers.training_args" not in sys.modules:
        return []
    from deepspeed_compress.integrations.hf import follow_trainers

    return [follow_trainers()]
