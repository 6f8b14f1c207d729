"""Compiled parts of a model, in whose graphs hooks take over nothing."""

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_compress.errors import UnsupportedError


def is_compiled(module: nn.Module) -> bool:
    """Return True if calls of `module` run a compiled graph."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def compiled_problem(key: str, what: str, remedy: str) -> str:
    """Return the message that `key` cannot take over `what`, such as "sums"."""
    return f"{key}: {what} inside a compiled graph cannot be taken over; {remedy}, or remove the key"


@dataclass
class CompiledCalls:
    """Calls inside compiled graphs of which `key` should have taken over `what`, such as "sums".

    Attributes:
        model: the model.
        key: key of the section.
        what: what it takes over.
        found: True if there was such a call.
    """

    model: weakref.ref[nn.Module]
    key: str
    what: str
    found: bool = False

    def note(self) -> None:
        """Record a call that is traced. Without gradients, nothing is taken over anyway."""
        self.found = self.found or torch.is_grad_enabled()

    def before_step(self) -> None:
        """Refuse to step after such a call.

        Raises:
            UnsupportedError: there was one. The message names the compiled parts of the model.
        """
        model = self.model()
        if self.found and model is not None:
            parts = [name or "the model" for name, module in model.named_modules() if is_compiled(module)]
            remedy = f"do not compile {', '.join(parts) or 'the model'}"
            raise UnsupportedError(compiled_problem(self.key, self.what, remedy))

    def after_step(self, applied: bool) -> None:
        """Do nothing: Megatron calls this for everything that takes part in a step."""
