"""`install`: attach to every engine to come, and have Hugging Face libraries check the section early.

Nothing is imported here before the program imports it, so that libraries read the environment that the program sets.
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_compress.integrations.importing import Undo, after_import
from deepspeed_compress.integrations.plain import attach_to_all
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["install"]


def install(section: str | Path | dict[str, Any] | None = None) -> Callable[[], None]:
    """Attach to every engine that `deepspeed.initialize` makes from now on, if its configuration has the section.

    For code that calls DeepSpeed by itself: HF Trainer, Accelerate, TRL, scripts that cannot be edited. Configurations
    without the section go to DeepSpeed untouched, and so do engines without an optimizer, which have no gradients.
    Where Accelerate is installed the section is checked when the configuration is read, before there is a model, and
    Trainers log what compression does (`integrations.hf`). A second call changes nothing. Imports no library by
    itself: each is changed when the program imports it.

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
    with ExitStack() as undo:
        if find_spec("deepspeed") is not None:
            for module, action in _ACTIONS:
                undo.callback(after_import(module, action))
        if section is not None:
            undo.callback(attach_to_all(section))
        return undo.pop_all().close


def _follow_deepspeed() -> Undo:
    import deepspeed

    return replace_method(deepspeed, "initialize", _attaching)


def _attaching(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(*args: Any, **options: Any) -> Any:
        # Loads the compiler of torch, which reads its environment, so the program must have come this far.
        from deepspeed_compress.engine.initialize import initialize_if_asked

        return initialize_if_asked(original, args, options)

    return initialize


def _check_early() -> Undo:
    from deepspeed_compress.integrations.early import check_early

    return check_early()


def _warn_of_inexact() -> Undo:
    from deepspeed_compress.integrations.saving import warn_of_inexact

    return warn_of_inexact()


_ACTIONS: tuple[tuple[str, Callable[[], Undo]], ...] = (
    ("deepspeed", _follow_deepspeed),
    ("accelerate.utils.deepspeed", _check_early),
    ("accelerate.accelerator", _warn_of_inexact),
)
"""Modules, and what is done once a program has imported them."""
