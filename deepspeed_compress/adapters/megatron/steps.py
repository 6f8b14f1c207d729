"""Optimizer steps of Megatron: `step` of its optimizer says whether it has stepped, and how long the gradients were."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepspeed_compress.adapters.steps import UNKNOWN
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.remembered import FinishedStep
from deepspeed_compress.session.session import Session

__all__ = ["Around", "MegatronSteps"]


class Around(Protocol):
    """What has something to do before and after each step of the optimizer."""

    def before_step(self) -> None: ...

    def after_step(self, applied: bool) -> None: ...


class MegatronSteps:
    """Tells `sessions` how every step of `optimizer` ended; see `StepFollower`.

    Gradients that were reduced and are cleared (`zero_grad_buffer` of one of the `chunks`) before the optimizer has
    stepped were in vain, as when Megatron repeats an iteration to check its result.
    """

    def __init__(
        self, sessions: Sequence[Session], optimizer: Any, chunks: Sequence[Any], around: Sequence[Around]
    ) -> None:
        self.count = 0
        self.reduced = False
        self._sessions = sessions
        self._optimizer = optimizer
        self._around = around
        patches: Patches = sessions[0].patches
        patches.wrap(optimizer, "step", self._step)
        for chunk in chunks:
            patches.wrap(chunk, "zero_grad_buffer", self._zero_grad_buffer)

    @property
    def loss_scale(self) -> float:
        """Of the optimizer's scaler, if it has one: a GPU is waited for then, as in every such step of Megatron."""
        return float(self._optimizer.get_loss_scale()) if _scaled(self._optimizer) else 1.0

    @property
    def global_steps(self) -> int:
        """`count`, by the name that DeepSpeed's engine has for it."""
        return self.count

    def begin(self, step: int) -> None:
        self.count, self.reduced = step, False
        for session in self._sessions:
            session.begin(step, self.loss_scale)

    def forget(self) -> None:
        if self.reduced:
            self._end(False, None, self._sessions[0].clock.loss_scale)

    def _step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for one in self._around:
            one.before_step()
        result = step(*args, **options)
        applied, norm = bool(result[0]), result[1]
        for one in self._around:
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
            # Megatron gives 0 where it computes none.
            session.finish(
                FinishedStep(self.count, UNKNOWN, applied, before, scale_after, float(norm) if norm else None)
            )


def _scaled(optimizer: Any) -> bool:
    """Whether the loss is scaled: by the scaler of one of the optimizers that `optimizer` is made of."""
    return any(
        getattr(one, "grad_scaler", None) is not None for one in getattr(optimizer, "chained_optimizers", [optimizer])
    )
