"""The optimizer step: `DeepSpeedEngine._take_model_step`, which both the plain and the pipeline engine go through."""

from collections.abc import Callable
from typing import Any

from deepspeed_compress.engine.checkpoint import loss_scale
from deepspeed_compress.engine.session import FinishedStep, Session

__all__ = ["follow_steps"]


def follow_steps(engine: Any, session: Session, weight_bytes: Callable[[], int], ended: Callable[[], None]) -> None:
    """Tell `session` the outcome of every optimizer step, and then call `ended`.

    DeepSpeed calls the method at accumulation boundaries alone, whoever decides them, and counts a step that the
    loss scaler discards in `skipped_steps`.
    """
    original = engine._take_model_step

    def _take_model_step(lr_kwargs: Any) -> None:
        scale, skipped = loss_scale(engine), engine.skipped_steps
        original(lr_kwargs)
        applied = engine.skipped_steps == skipped
        session.meter.bytes_weights += weight_bytes() if applied else 0
        session.finish(FinishedStep(engine.global_steps, engine.global_samples, applied, scale, loss_scale(engine)))
        ended()

    engine._take_model_step = _take_model_step
