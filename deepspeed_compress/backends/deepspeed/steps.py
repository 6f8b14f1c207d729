"""Passes and optimizer steps of DeepSpeed engines: their losses, their times, and what happens around a step."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.backends.deepspeed.node_shards import NodeShards
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.checkpointing.deepspeed.checkpoint import load_last
from deepspeed_compress.session.observer import Losses, StepWatch
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session

if TYPE_CHECKING:
    from deepspeed_compress.rollout import Publisher

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


@dataclass(frozen=True)
class OptimizerStep:
    """Replacement for the optimizer step, which reports every outcome to the session and carries out its decisions.

    Attributes:
        engine: the engine.
        session: the engine's session.
        norms: receives the norm of the gradients; None if nothing needs it.
        weight_bytes: returns the bytes that this rank sends for weights in one step.
        stop_counting: ends the count of a divided model's messages until the next pass.
        nodes: averages gradients over the nodes before a step, if the model is sharded within them; None otherwise.
        rollout: publishes the weights for rollout workers; None if the section does not ask for it.
    """

    engine: Any
    session: Session
    norms: Norms | None
    weight_bytes: Callable[[], int]
    stop_counting: Callable[[], None]
    nodes: NodeShards | None = None
    rollout: "Publisher | None" = None

    def take(self, original: Callable[..., None], *args: Any) -> None:
        """Run DeepSpeed's `_take_model_step`, and finish the step in the session.

        DeepSpeed calls it only at accumulation boundaries, however they are decided. It counts a step that its own loss
        scaler discards in `skipped_steps`. One that torch's gradient scaler discards without ZeRO is not counted, but
        the scale falls, which happens in no other step.
        """
        engine, session = self.engine, self.session
        scale, skipped = loss_scale(engine), engine.skipped_steps
        if session.saving is not None:
            session.saving.before_step()
        if self.rollout is not None and not self.rollout.calls:
            # The first weights of this process. The program may have loaded a checkpoint before.
            self.rollout.publish(step=engine.global_steps)
        if session.watch is not None:
            session.watch.start()
        if self.nodes is not None:
            self.nodes.average()
        with self.norms.recording() if self.norms is not None else nullcontext():
            original(*args)
        if session.watch is not None:
            session.watch.stop()
        applied = engine.skipped_steps == skipped and loss_scale(engine) >= scale
        session.meter.count("bytes_weights", self.weight_bytes() if applied else 0)
        if session.plan.sync:
            session.renew_weights()
        norm = self.norms.newest if self.norms is not None else None
        done = FinishedStep(engine.global_steps, engine.global_samples, applied, scale, loss_scale(engine), norm)
        if session.finish(done):
            load_last(engine)
        session.exchange_with_islands(engine.global_steps)
        if self.rollout is not None and applied:
            self.rollout.publish(step=engine.global_steps)
        if session.saving is not None:
            session.saving.step_ended(engine.global_steps, applied)
        self.stop_counting()
