"""Hugging Face Trainer: `attach` compresses the training of one Trainer, and `follow_trainers` that of all later ones.

Trainers that use the section get logs, and resume from complete checkpoints.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.install import install
from deepspeed_compress.integrations.patching import Undo, replace_methods
from deepspeed_compress.integrations.trainer_callback import CompressionCallback, newest_complete_checkpoint
from deepspeed_compress.launcher.heartbeat import RESUME

__all__ = ["CompressionCallback", "attach"]


def attach(trainer: Trainer) -> Trainer:
    """Compress the training of `trainer`, log compression figures, and return it. Call this before `trainer.train()`.

    You need not call this after `deepspeed_compress.install()`, which does it for every Trainer.

    Raises:
        ConfigError: if the trainer has no DeepSpeed configuration, or its section is missing or invalid.
    """
    ds_config = configuration_of(trainer)
    if ds_config is None:
        remedy = f'write TrainingArguments(deepspeed=FILE), with the section "{SECTION}" in FILE'
        raise ConfigError(f"the trainer does not use DeepSpeed; {remedy}")
    parse_section(ds_config)
    install()
    # `install` does it when a configuration is read, but that of `trainer` has been read already.
    follow_trainers()
    add_callback(trainer)
    return trainer


def follow_trainers() -> Undo:
    """Add a `CompressionCallback` to every later Trainer whose configuration has the section.

    Such Trainers also resume from their own checkpoints (`_resuming`).

    Returns:
        A function that undoes both changes.
    """
    return replace_methods((Trainer, "__init__", _with_callback), (Trainer, "train", _resuming))


def _with_callback(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    """Make a Trainer with a callback, if its configuration has the section."""
    original(self, *args, **options)
    if SECTION in (configuration_of(self) or {}):
        add_callback(self)


def _resuming(
    original: Callable[..., Any], self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any
) -> Any:
    """Run `Trainer.train`, which resumes from Trainer's newest complete checkpoint.

    It does so if the section or the environment requests resuming and the program names no other checkpoint. If SIGTERM
    has ended training, the program exits as well, because it would otherwise treat the model as fully trained.
    """
    section = (configuration_of(self) or {}).get(SECTION)
    if section is None:
        return original(self, resume_from_checkpoint, *args, **options)
    with _leave_resuming_to_trainer(section) as requested:
        chosen = resume_from_checkpoint
        if chosen is True and section.get("checkpointing") is not None:
            # The newest checkpoint may be incomplete if training was interrupted. If there is none, Trainer raises.
            chosen = newest_complete_checkpoint(Path(self.args.output_dir)) or True
        elif chosen is None and requested:
            chosen = newest_complete_checkpoint(Path(self.args.output_dir))
        result = original(self, chosen, *args, **options)
    for callback in self.callback_handler.callbacks:
        if isinstance(callback, CompressionCallback):
            callback.exit_if_requested()
    return result


@contextmanager
def _leave_resuming_to_trainer(section: dict[str, Any]) -> Iterator[bool]:
    """Yield True if the section or the environment requests resuming.

    In this context the engine does not resume by itself, because its own checkpoints lack the state of Trainer.
    """
    settings = section.get("checkpointing")
    resume = settings.get("resume") if isinstance(settings, dict) else None
    if isinstance(settings, dict):
        section["checkpointing"] = {**settings, "resume": False}
    try:
        yield os.environ.get(RESUME) == "1" if resume is None else resume
    finally:
        if isinstance(settings, dict):
            section["checkpointing"] = settings


def configuration_of(trainer: Trainer) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration that `trainer` uses; None if it does not use DeepSpeed."""
    plugin = trainer.args.deepspeed_plugin
    return None if plugin is None else plugin.hf_ds_config.config


def add_callback(trainer: Trainer) -> None:
    """Add the callback in front of all others, because reporters send the logs as they find them."""
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, CompressionCallback) for callback in callbacks):
        callbacks.insert(0, CompressionCallback(trainer))
