"""Gradient sums of column-parallel layers, whose input every tensor-parallel rank has.

DeepSpeed sums the gradient of the input in the backward pass of every such layer. Query, key and value read the same
tensor, and so do gate and up. They get one tensor in its place, whose gradient autograd adds up before it is summed
over the ranks.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.backends.activations.compiled import CompiledCalls
from deepspeed_compress.backends.activations.hooks import LayerHooks
from deepspeed_compress.backends.activations.sums import TensorSum, sum_gradient
from deepspeed_compress.backends.deepspeed.activations.layers import is_column, sums_itself
from deepspeed_compress.monitor import Meter, ring_all_reduce


def find_siblings(model: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    """Yield each module with column-parallel layers as children, and these layers; every layer once."""
    seen: set[nn.Module] = set()
    for parent in model.modules():
        layers = [child for child in parent.children() if is_column(child) and child not in seen]
        seen.update(layers)
        if layers:
            yield parent, layers


@dataclass(frozen=True)
class _SumForReaders:
    """Sum of a gradient that DeepSpeed would compute once for each of the `readers`."""

    total: TensorSum
    meter: Meter
    readers: Collection[int]

    def __call__(self, gradient: Tensor) -> Tensor:
        alone = ring_all_reduce(gradient.nbytes, self.total.group.size())
        self.meter.count("bytes_tensor_saved", (len(self.readers) - 1) * alone)
        return self.total(gradient)


@dataclass(frozen=True)
class _Reading:
    """Input that some layers (`readers`, by id) have read in one version, and the tensor that they got in its place."""

    source: Tensor
    version: int
    readers: set[int]
    replaced: Tensor

    def is_for(self, reader: int, x: Tensor) -> bool:
        return self.source is x and self.version == x._version and reader not in self.readers


@dataclass
class SharedInput:
    """Input of sibling layers, whose gradient is summed once for all that read the same tensor.

    Attributes:
        total: sum over the ranks.
        meter: counter of the bytes saved.
        layers: number of siblings.
    """

    total: TensorSum
    meter: Meter
    layers: int
    _reading: _Reading | None = field(default=None, init=False)
    _handle: RemovableHandle | None = field(default=None, init=False)

    def attach(self, parent: nn.Module) -> None:
        """Release the input whenever the forward pass of the module around the siblings has ended."""
        self._handle = parent.register_forward_hook(self._forget, always_call=True)

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._reading = None

    def read(self, reader: int, x: Tensor) -> Tensor:
        """Return the tensor that the layer `reader` gets in place of `x`, which requires a gradient.

        Readers get the same tensor if they read the same one, unchanged, and each only once. So a layer that runs
        again, for instance because it is recomputed, never joins an earlier pass. This depends on the program alone,
        and is the same on all ranks.
        """
        if self._reading is None or not self._reading.is_for(reader, x):
            self._reading = self._first(x)
        reading = self._reading
        reading.readers.add(reader)
        if len(reading.readers) == self.layers:
            self._reading = None
        return reading.replaced

    def _first(self, x: Tensor) -> _Reading:
        # Autograd keeps the sum, so it must not refer to tensors.
        readers: set[int] = set()
        replaced = sum_gradient(x, _SumForReaders(self.total, self.meter, readers))
        return _Reading(x, x._version, readers, replaced)

    def _forget(self, parent: nn.Module, inputs: Any, output: Any) -> None:
        self._reading = None

    def __deepcopy__(self, memo: Any) -> "SharedInput":
        """Return this object, which copies of the module carry in their hooks."""
        return self


class ColumnHooks(LayerHooks):
    """Hooks of a column-parallel layer: its input is replaced by one whose gradient is summed."""

    def __init__(self, layer: Any, shared: SharedInput, compiled: CompiledCalls) -> None:
        super().__init__(layer, {"mp_group": None}, compiled)
        self._reader, self._shared = id(layer), shared

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        differentiates = len(inputs) == 1 and torch.is_grad_enabled() and inputs[0].requires_grad
        return differentiates and sums_itself(layer)

    def replaced(self, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        return (self._shared.read(self._reader, inputs[0]),)
