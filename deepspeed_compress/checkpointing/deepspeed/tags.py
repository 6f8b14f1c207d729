"""Names of DeepSpeed checkpoints."""

from typing import Any


def tag_of(engine: Any, tag: object) -> str:
    """Return the name of the directory that `save_checkpoint` of `engine` writes for `tag`.

    `tag` may be any value, including 0; None stands for the current step.
    """
    return f"global_step{engine.global_steps}" if tag is None else str(tag)
