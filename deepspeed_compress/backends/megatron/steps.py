"""Tracking of Megatron's optimizer steps: `step` returns whether it was applied, and the norm of the gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepspeed_compress.backends.steps import UNKNOWN, StepFollower
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session


class StepHook(Protocol):
    """Interface for objects that act before and after each step of the optimizer."""

    def before_step(self) -> None: ...

    def after_step(self, applied: bool) -> None: ...


class MegatronSteps(StepFollower):
    """Reports to `sessions` how every step of `optimizer` ended.

    If gradients were reduced and then cleared (`zero_grad_buffer` of one of the `chunks`) before the optimizer stepped,
    as when Megatron repeats an iteration to check its result, the reductions are discarded.
    """

    def __init__(
        self, sessions: Sequence[Session], optimizer: Any, chunks: Sequence[Any], hook: Sequence[StepHook]
    ) -> None:
        self._sessions = sessions
        self._optimizer = optimizer
        self._hooks = hook
        patches: Patches = sessions[0].patches
        patches.wrap(optimizer, "step", self._step)
        for chunk in chunks:
            patches.wrap(chunk, "zero_grad_buffer", self._zero_grad_buffer)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the optimizer's scaler, or 1.0 without one.

        With a scaler, this waits for the GPU, as every such step of Megatron does.
        """
        return float(self._optimizer.get_loss_scale()) if _scaled(self._optimizer) else 1.0

    @property
    def global_steps(self) -> int:
        """Return `count`, under the name that DeepSpeed's engine uses."""
        return self.count

    def begin(self, step: int) -> None:
        self.count, self.reduced = step, False
        for session in self._sessions:
            session.begin(step, self.loss_scale)

    def forget(self) -> None:
        if self.reduced:
            self._end(False, None, self._sessions[0].clock.loss_scale)

    def _step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for one in self._hooks:
            one.before_step()
        result = step(*args, **options)
        applied, norm = bool(result[0]), result[1]
        for one in self._hooks:
            one.after_step(applied)
        self._end(applied, norm if applied else math.inf, self.loss_scale)
        return result

    def _zero_grad_buffer(self, zero_grad_buffer: Callable[..., None], *args: Any, **options: Any) -> None:
        zero_grad_buffer(*args, **options)
        self.forget()

    def _end(self, applied: bool, norm: Any, scale_after: float) -> None:
        self.count, self.reduced = self.count + 1, False
        for session in self._sessions:
            before = session.clock.loss_scale
            # Megatron returns 0 if it computes no norm.
            session.finish(
                FinishedStep(self.count, UNKNOWN, applied, before, scale_after, float(norm) if norm else None)
            )


def _scaled(optimizer: Any) -> bool:
    """Return True if one of the optimizers that `optimizer` consists of scales the loss."""
    return any(
        getattr(one, "grad_scaler", None) is not None for one in getattr(optimizer, "chained_optimizers", [optimizer])
    )
