"""Losses as DeepSpeed's engines see them: in `backward`, or as the mean that a pipeline's `train_batch` gives."""

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.engine.islands.division import deciding_group
from deepspeed_compress.engine.seams import Seam
from deepspeed_compress.session.observer import Losses
from deepspeed_compress.session.patches import Patches

__all__ = ["SEAMS", "follow_losses"]

SEAMS = (Seam("deepspeed.runtime.engine:DeepSpeedEngine.backward", ("args", "kwargs")),)


def follow_losses(engine: Any, patches: Patches) -> Losses:
    """The losses of `engine`, from now on until `patches` are undone."""
    losses = Losses(engine.device, deciding_group(engine))
    patches.on_undo(losses.wait)
    if isinstance(engine, PipelineEngine):
        patches.wrap(engine, "train_batch", partial(_train_batch, losses))
    else:
        patches.wrap(engine, "backward", partial(_backward, losses))
    return losses


def _train_batch(losses: Losses, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    loss = original(*args, **options)
    losses.record(loss)
    return loss


def _backward(losses: Losses, original: Callable[..., Any], loss: Any, *args: Any, **options: Any) -> Any:
    result = original(loss, *args, **options)
    losses.record(loss)
    return result
