"""Losses and times of the passes of DeepSpeed engines.

Losses come from `backward`, or from a pipeline's `train_batch`, which returns the mean. Times, for `auto`, are those of
forward and backward passes; `OptimizerStep` adds its own part.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.session.observer import Losses, StepWatch
from deepspeed_compress.session.patches import Patches

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
LOSS_SEAMS = (Seam(_ENGINE + "backward"),)
TIME_SEAMS = (Seam(_ENGINE + "forward"), *LOSS_SEAMS)


def follow_losses(engine: Any, losses: Losses, patches: Patches) -> None:
    """Record the losses of `engine` in `losses` until `patches` are undone."""
    patches.on_undo(losses.wait)
    if isinstance(engine, PipelineEngine):
        patches.wrap(engine, "train_batch", partial(_train_batch, losses))
    else:
        patches.wrap(engine, "backward", partial(_backward, losses))


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


def watch_steps(engine: Any, watch: StepWatch, patches: Patches) -> None:
    """Let `watch` run during the passes of `engine` until `patches` are undone. `OptimizerStep` adds its own part.

    The time of a pipeline runs through all of `train_batch`, in which stages wait for each other. A backward pass that
    is not begun by `engine.backward` counts until the next forward pass or the optimizer step.
    """
    if isinstance(engine, PipelineEngine):
        patches.precede(engine, "train_batch", watch.start)
    else:
        patches.wrap(engine, "forward", partial(_forward, engine, watch))
        patches.wrap(engine, "backward", partial(_timed_backward, watch))


def _forward(engine: Any, watch: StepWatch, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `forward`. If it trains, the watch runs."""
    if engine.module.training and torch.is_grad_enabled():
        watch.note_batch((args, options))
        watch.start()
    return original(*args, **options)


def _timed_backward(watch: StepWatch, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `backward`, and stop the watch."""
    watch.start()
    result = original(*args, **options)
    watch.stop()
    return result
