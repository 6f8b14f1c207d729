"""Compressed sums inside transformer layers, in the forward and in the backward pass.

`ColumnParallelLinear` sums the gradient of its input, and `RowParallelLinear` its output. With sequence parallelism,
the first one also gathers its input, and the second one keeps its part of the sum. Both leave that to others if
`explicit_expert_comm` is set, as Megatron does for shared experts that overlap. Hooks set it while the forward pass of
a layer runs, and exchange themselves. Embeddings, the output layer, and the loss are outside of transformer layers.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.hooks import CompiledCalls, LayerHooks, TrainingPass
from deepspeed_compress.backends.activations.messages import ActivationMessages, activation_codec, gradient_codec
from deepspeed_compress.backends.activations.sums import (
    SequenceExchange,
    SumOver,
    TensorSum,
    gather_sequence,
    scatter_sum,
    sequences_over,
    sum_gradient,
    sum_output,
    sums_over,
)
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION, TensorActivations
from deepspeed_compress.session.patches import Patches

TENSOR = f"/{SECTION}/activations/tensor"


def find_summed(chunk: nn.Module) -> list[Any]:
    """Return the layers inside the transformer layers of `chunk` that sum over tensor-parallel ranks."""
    return [layer for layer in find_inner(chunk) if _is_column(layer) or _is_row(layer)]


def find_inner(chunk: nn.Module) -> dict[nn.Module, None]:
    """Return the modules inside the transformer layers of `chunk`, each once."""
    outer = (one for one in chunk.modules() if isinstance(one, BaseTransformerLayer))
    return {module: None for layer in outer if isinstance(layer, nn.Module) for module in layer.modules()}


def _is_column(layer: Any) -> bool:
    """Return True if `layer` sums the gradient of its input. Otherwise, it leaves that to others."""
    sums = type(layer).forward is ColumnParallelLinear.forward and (layer.allreduce_dgrad or layer.sequence_parallel)
    return sums and not layer.explicit_expert_comm


def _is_row(layer: Any) -> bool:
    sums = type(layer).forward is RowParallelLinear.forward and layer.tp_group.size() > 1
    return sums and not layer.explicit_expert_comm


class ColumnHooks(LayerHooks):
    """Hooks of a column-parallel layer: its input is replaced by one whose gradient is summed."""

    def __init__(self, layer: nn.Module, total: TensorSum, compiled: CompiledCalls) -> None:
        super().__init__(layer, {"explicit_expert_comm": True}, compiled)
        self._total = total

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        return bool(inputs) and torch.is_grad_enabled() and inputs[0].requires_grad and _is_column(layer)

    def replaced(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return sum_gradient(inputs[0], self._total), *inputs[1:]


class SequenceColumnHooks(LayerHooks):
    """Hooks of a column-parallel layer whose input, a part of a sequence, is gathered in training."""

    def __init__(
        self, layer: nn.Module, exchange: SequenceExchange, training: TrainingPass, compiled: CompiledCalls
    ) -> None:
        super().__init__(layer, {"explicit_expert_comm": True}, compiled)
        self._exchange, self._training = exchange, training

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        carried = bool(inputs) and ActivationMessages.carries(inputs[0])
        return carried and self._training.is_training and _is_column(layer)

    def replaced(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_sequence(inputs[0], self._exchange), *inputs[1:]


class RowHooks(LayerHooks):
    """Hooks of a row-parallel layer: its output is summed in training, and then gets its bias if the layer adds it.

    Args:
        layer: the layer.
        total: the sum, or this rank's part of it.
        training: tells passes that are trained on.
        compiled: record of the calls that are compiled, and not taken over.
    """

    def __init__(
        self, layer: nn.Module, total: Callable[[Tensor], Tensor], training: TrainingPass, compiled: CompiledCalls
    ) -> None:
        # Without its own sum, the layer returns its bias in any case.
        super().__init__(layer, {"explicit_expert_comm": True, "skip_bias_add": True}, compiled)
        self._total, self._training = total, training

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        return self._training.is_training and _is_row(layer)

    def summed(self, layer: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        part, bias = output
        total = self._total(part)
        if layer.skip_bias_add:
            return total, bias
        return total if bias is None else total + bias, None


class SequenceRowHooks(RowHooks):
    """Hooks of a row-parallel layer that keeps its part of the sum."""

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        return super().takes(layer, inputs) and bool(inputs) and ActivationMessages.carries(inputs[0])


def attach_tensor(
    chunks: Sequence[nn.Module], settings: TensorActivations, run: Run, patches: Patches
) -> list[CompiledCalls]:
    """Compress the sums of the model `chunks` of this rank, until `patches` are undone.

    Returns:
        What has to be called before each step of the optimizer.
    """
    bits, of_gradients = settings.bits, settings.bits_of_gradients
    if bits is None or of_gradients is None:
        return []
    exchanges = _Exchanges(
        sums_over(activation_codec(bits), run),
        sums_over(gradient_codec(of_gradients), run),
        sequences_over(bits, of_gradients, run.meter),
    )
    compiled = [CompiledCalls(weakref.ref(chunk), TENSOR, "sums") for chunk in chunks]
    for chunk, calls in zip(chunks, compiled, strict=True):
        training = TrainingPass(chunk)
        patches.on_undo(training.detach)
        for layer in find_summed(chunk):
            hooks = exchanges.hooks(layer, training, calls)
            hooks.attach(layer)
            patches.on_undo(hooks.detach)
    return compiled


@dataclass(frozen=True)
class _Exchanges:
    """Exchanges of layers by group: sums of outputs, sums of gradients of inputs, and those of parts of sequences."""

    outputs: SumOver
    gradients: SumOver
    sequences: Callable[[ProcessGroup], SequenceExchange]

    def hooks(self, layer: Any, training: TrainingPass, compiled: CompiledCalls) -> LayerHooks:
        """Return the hooks of a layer that sums."""
        group = layer.tp_group
        if not layer.sequence_parallel:
            if _is_row(layer):
                return RowHooks(layer, partial(sum_output, total=self.outputs(group)), training, compiled)
            return ColumnHooks(layer, self.gradients(group), compiled)
        if _is_row(layer):
            return SequenceRowHooks(layer, partial(scatter_sum, exchange=self.sequences(group)), training, compiled)
        return SequenceColumnHooks(layer, self.sequences(group), training, compiled)
