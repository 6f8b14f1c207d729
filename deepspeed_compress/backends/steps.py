"""Tracking of optimizer steps without an engine, through the hooks of a torch optimizer and a gradient scaler."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches, leave_out_of_copies
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session

_INSIDE = ("optimizer", "optim")
"""Attributes in which wrappers keep it: Accelerate's `AcceleratedOptimizer`, torch's `PostLocalSGDOptimizer`."""


class StepFollower(ABC):
    """Base class of objects that report to sessions how the steps of an optimizer end.

    Attributes:
        count: number of finished steps, including skipped ones.
        reduced: True if gradients of the running step have been reduced.
    """

    count = 0
    reduced = False

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """Return the factor that gradients carry; 1.0 without a scaler."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin optimizer step `step` (0-based)."""

    def gradients_reduced(self) -> None:
        """Note that gradients of the running step have been reduced."""
        self.reduced = True

    @abstractmethod
    def forget(self) -> None:
        """Discard the reductions of the running step, if any, because the gradients were cleared."""


def forget_if_cleared(steps: StepFollower, parameters: Iterable[nn.Parameter]) -> None:
    """Have `steps` forget what was reduced if the program has removed the gradients of all `parameters` itself."""
    if steps.reduced and all(parameter.grad is None for parameter in parameters):
        steps.forget()


def forget_when_cleared(module: nn.Module, steps: StepFollower, patches: Patches) -> None:
    """Have `steps` forget what was reduced when `module` clears its gradients.

    Nothing refers to the module strongly, so that a model of a former training is freed at once.
    """
    reference, replaced = weakref.ref(module), vars(module).get("zero_grad")
    vars(module)["zero_grad"] = partial(_clear, steps, replaced or partial(_zero_grad, reference))
    patches.on_undo(partial(_restore, reference, replaced))


def _zero_grad(reference: "weakref.ref[nn.Module]", *args: Any, **options: Any) -> None:
    module = reference()
    assert module is not None, "called through the module"
    type(module).zero_grad(module, *args, **options)


def _restore(reference: "weakref.ref[nn.Module]", replaced: Any) -> None:
    module = reference()
    if module is not None:
        vars(module).pop("zero_grad", None)
        vars(module).update({} if replaced is None else {"zero_grad": replaced})


def _clear(steps: StepFollower, zero_grad: Callable[..., None], *args: Any, **options: Any) -> None:
    zero_grad(*args, **options)
    steps.forget()


class TorchSteps(StepFollower):
    """Reports to `session` how every step of `optimizer` ended.

    A step is finished when the optimizer has stepped.
    With a `scaler`, it is finished at the scaler's next update, because the loss scale changes there and steps that
    overflow are skipped; or when gradients are cleared, if the program has stepped without the scaler. If the scale
    changes for another optimizer, the running step is treated as skipped. The same applies if gradients were reduced
    and then cleared before the optimizer stepped, as in a program that skips steps itself.
    """

    def __init__(self, session: Session, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        self._session = session
        self._optimizer = optimizer
        self._scaler = scaler
        self._asked = self._applied = False
        session.patches.on_undo(optimizer.register_step_post_hook(self._stepped).remove)
        session.patches.wrap(optimizer, "zero_grad", partial(_clear, self))
        if scaler is not None:
            leave_out_of_copies(scaler)
            session.patches.wrap(scaler, "step", self._scaler_step)
            session.patches.wrap(scaler, "update", self._update)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def begin(self, step: int) -> None:
        self.count, self.reduced, self._asked, self._applied = step, False, False, False
        self._session.begin(step, self.loss_scale)

    def forget(self) -> None:
        if self.reduced and not self._asked:
            # Applied if the program has stepped without the scaler.
            self._end(self._applied, self._session.clock.loss_scale)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        overflow = vars(optimizer).get("found_inf")
        # Set on a fused optimizer, which a scaler also calls in steps that it skips.
        self._applied = overflow is None or not float(overflow)
        if self._scaler is None:
            self._end(True, 1.0)

    def _scaler_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        self._asked |= optimizer is self._optimizer
        return step(optimizer, *args, **options)

    def _update(self, update: Callable[..., None], *args: Any, **options: Any) -> None:
        update(*args, **options)
        scale = self.loss_scale
        # Otherwise, the update was for another optimizer, and this optimizer's step continues.
        if self._asked or self._applied or scale != self._session.clock.loss_scale:
            self._end(self._applied, scale)

    def _end(self, applied: bool, scale_after: float) -> None:
        before = self._session.clock.loss_scale
        self.count, self.reduced, self._asked, self._applied = self.count + 1, False, False, False
        # Only an engine would count the samples of a step.
        self._session.finish(FinishedStep(self.count, None, applied, before, scale_after))


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer that `optimizer` is, or that it wraps.

    Raises:
        UnsupportedError: there is none.
    """
    found: Optimizer | None = optimizer
    # Wrappers are subclasses of Optimizer that do not call its constructor, which makes this attribute.
    while found is not None and not (isinstance(found, Optimizer) and "_optimizer_step_post_hooks" in vars(found)):
        inside = (getattr(found, name, None) for name in _INSIDE)
        found = next((one for one in inside if isinstance(one, Optimizer)), None)
    if found is None:
        raise UnsupportedError(
            f"optimizer: expected a torch optimizer, or a wrapper with one in its attribute `optimizer`, got "
            f"{type(optimizer).__name__}; pass the torch optimizer that updates the parameters"
        )
    return found
