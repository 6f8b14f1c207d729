"""`install`: every engine to come is attached to, and Hugging Face libraries check the section as early as they can."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["install"]


def install(section: str | Path | dict[str, Any] | None = None) -> Callable[[], None]:
    """From now on `deepspeed.initialize` attaches to every engine whose configuration has the section.

    For code that calls DeepSpeed by itself: HF Trainer, Accelerate, TRL, scripts that cannot be edited. Configurations
    without the section go to DeepSpeed untouched, and so do engines without an optimizer, which have no gradients.
    Where Accelerate is installed the section is checked when the configuration is read, before there is a model, and
    Trainers log what compression does (`integrations.hf`). A second call changes nothing.

    Args:
        section: a file, or a dict, with the section, for programs without DeepSpeed: every model of
            `DistributedDataParallel` or `fully_shard` (FSDP2) is attached to at its first forward pass in training
            (`ddp.attach`, `fsdp2.attach`), and its memories are in the checkpoints of Trainer and Accelerate. None
            leaves such models alone.

    Returns:
        A function that undoes all of it, for engines to come.

    Examples:
        >>> uninstall = deepspeed_compress.install()
        >>> trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json"))
    """
    # Loads torch and DeepSpeed, which those who only import this do not wait for.
    undo = [] if find_spec("deepspeed") is None else _install_for_deepspeed()
    if section is not None:
        from deepspeed_compress.integrations.plain import attach_to_all

        undo.append(attach_to_all(section))

    def uninstall() -> None:
        for action in undo:
            action()

    return uninstall


def _install_for_deepspeed() -> list[Callable[[], None]]:
    from deepspeed_compress.engine import initialize

    undo = [initialize.install()]
    if find_spec("accelerate") is not None:
        from deepspeed_compress.integrations.early import check_early
        from deepspeed_compress.integrations.saving import warn_of_inexact

        undo += [check_early(), warn_of_inexact()]
    return undo
