"""Hooks around the forward pass of layers whose sums are taken over, and around that of the whole model.

In the graphs of compiled parts, hooks take over nothing.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.errors import UnsupportedError


def is_compiled(module: nn.Module) -> bool:
    """Return True if calls of `module` run a compiled graph."""
    # `_orig_mod` is what torch._dynamo.OptimizedModule has, whose import takes seconds.
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


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


class LayerHooks:
    """Hooks around the forward pass of one layer, which take over its sum.

    Meanwhile some attributes of the layer have other values, so that it computes what this rank has, and sums nothing.
    They only hide a parameter of that name, which stays registered, so that even after an interrupt it is saved. Copies
    of the layer carry the same hooks, which ignore every layer but their own, so a copy sums as without them.

    Args:
        layer: the layer.
        during: attributes of the layer while its forward pass runs.
        compiled: record of the calls that are compiled, and not taken over.
    """

    def __init__(self, layer: nn.Module, during: Mapping[str, Any], compiled: CompiledCalls) -> None:
        self._layer, self._during, self._compiled = weakref.ref(layer), during, compiled
        self._own: dict[str, Any] | None = None
        """The layer's own attributes of these names while its forward pass runs; None otherwise."""
        self._handles: list[RemovableHandle] = []

    def attach(self, layer: nn.Module, first: bool = False) -> None:
        """Register the hooks; the hook before the forward pass is the first one if `first`, and else the last one."""
        before = layer.register_forward_pre_hook(self.before, prepend=first)
        self._handles += [before, layer.register_forward_hook(self.after, prepend=True, always_call=True)]

    def detach(self) -> None:
        """Remove the hooks."""
        self._restore()
        while self._handles:
            self._handles.pop().remove()

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        """Return True if the sum of this call is taken over. Overridden."""
        raise NotImplementedError

    def replaced(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the inputs of a call that is taken over; None leaves them as they are."""
        return None

    def summed(self, layer: Any, output: Any) -> Any:
        """Return the output of a call that was taken over; None leaves it as it is."""
        return None

    def before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Take the call over, unless it is traced or the layer is a copy."""
        if layer is not self._layer():
            return None
        self._restore()  # an interrupt has ended the last call before its hook
        if torch.compiler.is_compiling():
            self._compiled.note()
            return None
        if not self.takes(layer, inputs):
            return None
        attributes = vars(layer)
        self._own = {name: attributes[name] for name in self._during if name in attributes}
        attributes.update(self._during)
        return self.replaced(inputs)

    def after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Give the layer its attributes again. `output` is None if the forward pass has raised."""
        if layer is not self._layer() or self._own is None:
            return None
        self._restore()
        return None if output is None else self.summed(layer, output)

    def _restore(self) -> None:
        own, self._own, layer = self._own, None, self._layer()
        if own is not None and layer is not None:
            for name in self._during:
                vars(layer).pop(name, None)
            vars(layer).update(own)

    def __deepcopy__(self, memo: Any) -> "LayerHooks":
        return self


def find_parts(model: nn.Module) -> list[nn.Module]:
    """Return `model` and its modules that have parts of their own, which a program may call by themselves."""
    return [model, *(part for part in model.modules() if part is not model and list(part.children()))]


class TrainingPass:
    """Test for passes that are trained on, by hooks around the forward passes of the whole model and of its parts.

    Reentrant activation checkpointing runs layers without gradients first, and again, with gradients, in the backward
    pass, where another checkpoint may be inside. All of them must compute the same. An evaluation, also without
    gradients, is exact. An evaluation is told by gradients that are off when the outermost module begins.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = find_parts(model)
        self._model, self._modules = weakref.ref(model), weakref.WeakSet(modules)
        self._outermost: weakref.ref[nn.Module] | None = None
        """The outermost module that runs. After an interrupt, it stays until it or the model begins again."""
        self._trains = False
        self._handles: list[RemovableHandle] = []
        for module in modules:
            before = module.register_forward_pre_hook(self._begin, prepend=True)
            self._handles += [before, module.register_forward_hook(self._end, always_call=True)]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if module in self._modules and (self._outermost is None or module in (self._model(), self._outermost())):
            self._outermost, self._trains = weakref.ref(module), torch.is_grad_enabled()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._outermost is not None and module is self._outermost():
            self._outermost, self._trains = None, False

    @property
    def is_training(self) -> bool:
        return self._trains or torch.is_grad_enabled()

    def __deepcopy__(self, memo: Any) -> "TrainingPass":
        """Return this object, which copies of the model carry in their hooks, and which ignores them."""
        return self
