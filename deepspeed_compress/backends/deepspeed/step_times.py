"""Times of steps of DeepSpeed engines, for `auto`: forward and backward passes, and the optimizer step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.backends.deepspeed.losses import SEAMS as _BACKWARD
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.session.observer import StepWatch
from deepspeed_compress.session.patches import Patches

SEAMS = (Seam("deepspeed.runtime.engine:DeepSpeedEngine.forward"), *_BACKWARD)


def watch_steps(engine: Any, patches: Patches) -> StepWatch:
    """Watch the passes of `engine` until `patches` are undone. `Steps` adds the optimizer step.

    The time of a pipeline runs through all of `train_batch`, in which stages wait for each other. A backward pass that
    is not begun by `engine.backward` counts until the next forward pass or the optimizer step.
    """
    watch = StepWatch(engine.device)
    if isinstance(engine, PipelineEngine):
        patches.precede(engine, "train_batch", watch.start)
    else:
        patches.wrap(engine, "forward", partial(_forward, engine, watch))
        patches.wrap(engine, "backward", partial(_backward, watch))
    return watch


def _forward(engine: Any, watch: StepWatch, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `forward`. If it trains, the watch runs."""
    if engine.module.training and torch.is_grad_enabled():
        watch.note_batch((args, options))
        watch.start()
    return original(*args, **options)


def _backward(watch: StepWatch, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's `backward`, and stop the watch."""
    watch.start()
    result = original(*args, **options)
    watch.stop()
    return result
