"""Output sums of row-parallel layers, whose input is split over the tensor-parallel ranks."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_compress.backends.deepspeed.activations.layers import LayerHooks
from deepspeed_compress.backends.deepspeed.activations.sums import SumOutput, TensorSum


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


class RowHooks(LayerHooks):
    """Hooks of a row-parallel layer: its output is summed. Until then it lacks its bias, which is added to the sum.

    Calls outside of training are left to DeepSpeed.
    """

    def __init__(self, layer: Any, total: TensorSum, training: TrainingPass) -> None:
        super().__init__(layer)
        self._total, self._training = total, training
        self._bias: nn.Parameter | None = None

    def attach(self, layer: nn.Module) -> None:
        """Register the hooks. ZeRO 3 gathers the bias before the first, and frees it after the second."""
        before = layer.register_forward_pre_hook(self.before)
        self._handles += [before, layer.register_forward_hook(self.after, prepend=True, always_call=True)]

    def before(self, layer: Any, inputs: Any) -> None:
        """Take the group and the bias from the layer."""
        if self._training.is_training and self._may_begin(layer):
            self._begin(layer)
            self._bias, layer.bias = layer.bias, None

    def after(self, layer: Any, inputs: Any, output: Tensor | None) -> Tensor | None:
        """Return the sum, or None to leave the output as it is. `output` is None if the forward pass has raised."""
        if not self._ran(layer):
            return None
        self.restore(layer)
        if output is None:
            return None
        # PyTorch gives `apply` no types.
        total: Tensor = SumOutput.apply(output, self._total)  # type: ignore[no-untyped-call]
        return total if layer.bias is None else total + layer.bias

    def restore(self, layer: Any) -> None:
        """Give the layer its group and its bias again."""
        super().restore(layer)
        layer.bias, self._bias = self._bias, None
