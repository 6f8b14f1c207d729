"""Hooks around the forward pass of layers whose sums are taken over, and around that of the whole model."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class LayerHooks:
    """Hooks around the forward pass of one layer, which take over its sum.

    Meanwhile some attributes of the layer have other values, so that it computes what this rank has, and sums nothing.
    Copies of the layer carry the same hooks, which ignore every layer but their own, so a copy sums as without them.

    Args:
        layer: the layer.
        during: attributes of the layer while its forward pass runs.
    """

    def __init__(self, layer: nn.Module, during: Mapping[str, Any]) -> None:
        self._layer, self._during = weakref.ref(layer), during
        self._own: dict[str, Any] = {}
        """The layer's own attributes while its forward pass runs."""
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
        if torch.compiler.is_compiling() or not self.takes(layer, inputs):
            return None
        self._own = {name: getattr(layer, name) for name in self._during}
        for name, value in self._during.items():
            setattr(layer, name, value)
        return self.replaced(inputs)

    def after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Give the layer its attributes again. `output` is None if the forward pass has raised."""
        if layer is not self._layer() or not self._own:
            return None
        self._restore()
        return None if output is None else self.summed(layer, output)

    def _restore(self) -> None:
        layer = self._layer()
        while self._own:
            name, value = self._own.popitem()
            if layer is not None:
                setattr(layer, name, value)

    def __deepcopy__(self, memo: Any) -> "LayerHooks":
        return self


class TrainingPass:
    """Test for passes that are trained on, by hooks around the forward pass of the whole model.

    Reentrant activation checkpointing runs layers without gradients first, and again, with gradients, in the backward
    pass. Both must compute the same. An evaluation, also without gradients, is exact.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._runs = weakref.ref(model), False
        before = model.register_forward_pre_hook(self._begin, prepend=True)
        self._handles = [before, model.register_forward_hook(self._end, always_call=True)]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if model is self._model():
            self._runs = torch.is_grad_enabled()

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if model is self._model():
            self._runs = False

    @property
    def is_training(self) -> bool:
        return self._runs or torch.is_grad_enabled()

    def __deepcopy__(self, memo: Any) -> "TrainingPass":
        """Return this object, which copies of the model carry in their hooks, and which ignores them."""
        return self
