"""The optimizer step: `DeepSpeedEngine._take_model_step`, which both the plain and the pipeline engine go through."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from deepspeed_compress.engine.checkpoint import load_last, loss_scale
from deepspeed_compress.engine.comms_log import log_traffic
from deepspeed_compress.engine.norms import Norms
from deepspeed_compress.engine.session import FinishedStep, Session

__all__ = ["follow_steps"]


def follow_steps(
    engine: Any,
    session: Session,
    norms: Norms | None,
    weight_bytes: Callable[[], int],
    synchronise: Callable[[], None],
    ended: Callable[[], None],
) -> None:
    """Tell `session` the outcome of every optimizer step, do what its policy asks for, and then call `ended`.

    `norms` hears the norm of the gradients, if anyone wants to know it. `synchronise` makes weights exact everywhere.

    DeepSpeed calls the method at accumulation boundaries alone, whoever decides them, and counts a step that the
    loss scaler discards in `skipped_steps`.
    """
    original = engine._take_model_step

    def _take_model_step(lr_kwargs: Any) -> None:
        scale, skipped = loss_scale(engine), engine.skipped_steps
        with norms.heard() if norms is not None else nullcontext():
            original(lr_kwargs)
        applied = engine.skipped_steps == skipped
        session.meter.bytes_weights += weight_bytes() if applied else 0
        if session.synchronises:
            synchronise()
        norm = norms.newest if norms is not None else None
        done = FinishedStep(engine.global_steps, engine.global_samples, applied, scale, loss_scale(engine), norm)
        log_traffic(session, engine.device)
        if session.finish(done):
            load_last(engine)
        ended()

    engine._take_model_step = _take_model_step
