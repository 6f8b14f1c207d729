"""Losses of DeepSpeed engines: from `backward`, or from a pipeline's `train_batch`, which returns the mean."""

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import deciding_group
from deepspeed_compress.session.observer import Losses
from deepspeed_compress.session.patches import Patches

SEAMS = (Seam("deepspeed.runtime.engine:DeepSpeedEngine.backward"),)


def follow_losses(engine: Any, patches: Patches) -> Losses:
    """Record the losses of `engine` until `patches` are undone, and return the recorder."""
    losses = Losses(engine.device, deciding_group(engine))
    patches.on_undo(losses.wait)
    if isinstance(engine, PipelineEngine):
        patches.wrap(engine, "train_batch", partial(_train_batch, losses))
    else:
        patches.wrap(engine, "backward", partial(_backward, losses))
    return losses


def _train_batch(losses: Losses, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `train_batch`, and record the mean loss that it returns."""
    loss = original(*args, **options)
    losses.record(loss)
    return loss


def _backward(losses: Losses, original: Callable[..., Any], loss: Any, *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `backward`, and record its loss."""
    result = original(loss, *args, **options)
    losses.record(loss)
    return result
