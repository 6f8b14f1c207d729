"""Output sums of row-parallel layers, whose input is split over the tensor-parallel ranks."""

from typing import Any

from torch import Tensor

from deepspeed_compress.backends.activations.compiled import CompiledCalls
from deepspeed_compress.backends.activations.hooks import LayerHooks, TrainingPass
from deepspeed_compress.backends.activations.sums import TensorSum, sum_output
from deepspeed_compress.backends.deepspeed.activations.layers import sums_itself


class RowHooks(LayerHooks):
    """Hooks of a row-parallel layer: its output is summed. Until then it lacks its bias, which is added to the sum.

    Calls outside of training are left to DeepSpeed. ZeRO 3 gathers the bias before the first hook, and frees it after
    the second.
    """

    def __init__(self, layer: Any, total: TensorSum, training: TrainingPass, compiled: CompiledCalls) -> None:
        super().__init__(layer, {"mp_group": None, "bias": None}, compiled)
        self._total, self._training = total, training

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        return self._training.is_training and sums_itself(layer)

    def summed(self, layer: Any, output: Tensor) -> Tensor:
        total = sum_output(output, self._total)
        return total if layer.bias is None else total + layer.bias
