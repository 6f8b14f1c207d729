"""Seam of the optimizer step: `DeepSpeedEngine._take_model_step`, used by the plain and the pipeline engine."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.backends.deepspeed.comms_log import log_traffic
from deepspeed_compress.backends.deepspeed.node_shards import NodeShards
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.rollout import RolloutSteps
from deepspeed_compress.checkpointing.deepspeed.checkpoint import load_last
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session


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
    rollout: RolloutSteps | None = None

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
        if self.rollout is not None:
            self.rollout.before_step(engine.global_steps)
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
        if session.synchronises:
            session.renew_weights()
        norm = self.norms.newest if self.norms is not None else None
        done = FinishedStep(engine.global_steps, engine.global_samples, applied, scale, loss_scale(engine), norm)
        log_traffic(session, engine.device)
        if session.finish(done):
            load_last(engine)
        session.exchange_with_islands(engine.global_steps)
        if self.rollout is not None:
            self.rollout.step_ended(engine.global_steps, applied)
        if session.saving is not None:
            session.saving.step_ended(engine.global_steps, applied)
        self.stop_counting()
