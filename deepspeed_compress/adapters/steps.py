"""Optimizer steps without an engine: what an optimizer of torch, and a scaler of the loss, tell of them."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.session.copies import leave_out_of_copies
from deepspeed_compress.session.remembered import FinishedStep
from deepspeed_compress.session.session import Session

__all__ = ["UNKNOWN", "Scaler", "StepFollower", "Steps"]

UNKNOWN = None
"""Samples of a step: there is no engine that counts them."""
SEVERAL = 3
"""Steps of another optimizer, after which a warning tells of it."""


class Scaler(Protocol):
    """`torch.amp.GradScaler`, or one with its methods."""

    def get_scale(self) -> float: ...

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None: ...

    def update(self, new_scale: Any = None) -> None: ...


class StepFollower(Protocol):
    """Tells sessions how the steps of an optimizer end. `count`: steps that are over, left out ones included.
    `reduced`: whether gradients of the running step have been reduced."""

    count: int
    reduced: bool

    @property
    def loss_scale(self) -> float:
        """The factor that gradients carry; 1.0 without one."""

    def begin(self, step: int) -> None:
        """Begin optimizer step `step` (0-based)."""

    def forget(self) -> None:
        """The gradients have been cleared: if any were reduced since the last step, it was in vain."""


class Steps:
    """Tells `session` how every step of `optimizer` ended. `count`: steps that are over, left out ones included.

    A step is over when the optimizer has stepped; with a `scaler`, when that is updated after it, for the scale of the
    loss changes there, and steps that overflow are left out. Where the scale changes for another optimizer, the running
    step counts as left out. Gradients that were reduced and are cleared before anybody
    stepped were in vain, as in a program that leaves steps out by itself: that step leaves no trace either.
    """

    def __init__(self, session: Session, optimizer: Optimizer, scaler: Scaler | None) -> None:
        self.count = 0
        self.reduced = False
        """Whether gradients of the running step have been reduced."""
        self._session = session
        self._optimizer = optimizer
        self._scaler = scaler
        self._asked = self._applied = False
        self._changes_before, self._elsewhere = 0, 0
        session.patches.on_undo(optimizer.register_step_post_hook(self._stepped).remove)
        session.patches.wrap(optimizer, "zero_grad", self._zero_grad)
        if scaler is not None:
            leave_out_of_copies(scaler)
            session.patches.wrap(scaler, "step", self._scaler_step)
            session.patches.wrap(scaler, "update", self._update)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def begin(self, step: int) -> None:
        """Begin optimizer step `step` (0-based)."""
        self.count, self.reduced, self._asked, self._applied = step, False, False, False
        self._changes_before = self._changes()
        self._session.begin(step, self.loss_scale)

    def forget(self) -> None:
        """The gradients have been cleared: if any were reduced since the last step, it was in vain."""
        if self.reduced and not self._asked:
            self._warn_of_another()
            self._end(False, self._session.clock.loss_scale)

    def _changes(self) -> int:
        """How often the parameters have been changed in place, in all."""
        return sum(parameter._version for group in self._optimizer.param_groups for parameter in group["params"])

    def _warn_of_another(self) -> None:
        """Of parameters that have changed in steps that count as left out, several in a row: once may be the program,
        which has gone back to weights that it kept."""
        self._elsewhere += self._changes() != self._changes_before
        if self._elsewhere == SEVERAL:
            warnings.warn(
                f"parameters change, but not by the {type(self._optimizer).__name__} that was attached: these "
                "steps count as left out, and error feedback forgets what it kept back. Go on with that optimizer "
                "(groups can be added to it), or wrap the model anew and attach the one that steps",
                CompressWarning,
                stacklevel=3,
            )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._elsewhere = 0
        overflow = vars(optimizer).get("found_inf")
        # Of a fused optimizer, which a scaler calls also in steps that it leaves out.
        self._applied = overflow is None or not float(overflow)
        if self._scaler is None:
            self._end(True, 1.0)

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **options: Any) -> None:
        zero_grad(*args, **options)
        self.forget()

    def _scaler_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        self._asked |= optimizer is self._optimizer
        return step(optimizer, *args, **options)

    def _update(self, update: Callable[..., None], *args: Any, **options: Any) -> None:
        update(*args, **options)
        scale = self.loss_scale
        # Else it was for another optimizer, and the step of this one goes on.
        if self._asked or self._applied or scale != self._session.clock.loss_scale:
            self._end(self._applied, scale)

    def _end(self, applied: bool, scale_after: float) -> None:
        before = self._session.clock.loss_scale
        self.count, self.reduced, self._asked, self._applied = self.count + 1, False, False, False
        self._changes_before = self._changes()
        self._session.finish(FinishedStep(self.count, UNKNOWN, applied, before, scale_after))
