"""Tracking of Megatron's optimizer steps: `step` returns whether it was applied, and the norm of the gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_compress.backends.steps import StepFollower
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session


class MegatronSteps(StepFollower):
    """Reports to `sessions` how every step of `optimizer` ended.

    The functions `before` are called before each of its steps, and `after`, with True if the step was applied.
    If gradients were reduced and then cleared (`zero_grad_buffer` of one of the `chunks`) before the optimizer stepped,
    as when Megatron repeats an iteration to check its result, the reductions are discarded.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        optimizer: Any,
        chunks: Sequence[Any],
        before: Sequence[Callable[[], None]],
        after: Sequence[Callable[[bool], None]],
    ) -> None:
        self._sessions, self._optimizer = sessions, optimizer
        self._before, self._after = before, after
        patches = sessions[0].patches
        patches.wrap(optimizer, "step", self._step)
        for chunk in chunks:
            patches.wrap(chunk, "zero_grad_buffer", self._zero_grad_buffer)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the optimizer's scaler, or 1.0 without one.

        With a scaler, this waits for the GPU, as every such step of Megatron does.
        """
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        is_scaled = any(getattr(part, "grad_scaler", None) is not None for part in parts)
        return float(self._optimizer.get_loss_scale()) if is_scaled else 1.0

    def begin(self, step: int) -> None:
        self.count, self.reduced = step, False
        for session in self._sessions:
            session.begin(step, self.loss_scale)

    def forget(self) -> None:
        if self.reduced:
            self._end(False, None, self._sessions[0].clock.loss_scale)

    def _step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for prepare in self._before:
            prepare()
        result = step(*args, **options)
        applied, norm = bool(result[0]), result[1]
        for note in self._after:
            note(applied)
        self._end(applied, norm if applied else math.inf, self.loss_scale)
        return result

    def _zero_grad_buffer(self, zero_grad_buffer: Callable[..., None], *args: Any, **options: Any) -> None:
        zero_grad_buffer(*args, **options)
        self.forget()

    def _end(self, applied: bool, norm: Any, scale_after: float) -> None:
        self.count, self.reduced = self.count + 1, False
        for session in self._sessions:
            before = session.clock.loss_scale
            # The number of samples is unknown. Megatron returns 0 if it computes no norm.
            session.finish(FinishedStep(self.count, None, applied, before, scale_after, float(norm) if norm else None))
