"""What DeepSpeed calls a checkpoint."""

from typing import Any

__all__ = ["tag_of"]


def tag_of(engine: Any, tag: object) -> str:
    """The directory that `save_checkpoint` of `engine` writes for a `tag`: any number, 0 too, or None for the step."""
    return f"global_step{engine.global_steps}" if tag is None else str(tag)
