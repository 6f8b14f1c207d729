"""Check of the section when Accelerate reads a DeepSpeed configuration, before a model is loaded.

`TrainingArguments`, `DeepSpeedPlugin` and the `HfDeepSpeedConfig` of scripts all go through one method,
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: after the file has been read, and again when the
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
    """Check and expand the section of every configuration that is read from now on, and follow Trainers that use one.

    Returns:
        A function that undoes it.
    """
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
    """Return `ds_config` with the section's parallelism in DeepSpeed's own keys, which these libraries read.

    "auto" outside the section stays. Warnings are left to the engine, which issues them once.

    Raises:
        ConfigError: as `expand` and `check_world` do.
        UnsupportedError: for a pipeline.
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
    """Return True if the section is present, or a key that is almost certainly a typo of it."""
    return SECTION in ds_config or bool(difflib.get_close_matches(SECTION, map(str, ds_config), n=1, cutoff=0.8))


def _follow_trainers() -> list[Callable[[], None]]:
    """Follow Trainers if the program uses them, and return the functions that undo it.

    A program that makes a Trainer has imported its arguments before; others need not wait for the import.
    """
    if "transformers.training_args" not in sys.modules:
        return []
    from deepspeed_compress.integrations.hf import follow_trainers

    return [follow_trainers()]
