"""Sums of tensor parallelism: fewer of them in the backward pass, and compressed ones in both passes.

DeepSpeed sums the output of every row-parallel layer, whose input is split over the ranks, and in the backward pass the
gradient of the input of every column-parallel layer, whose input every rank has. Query, key and value read the same
tensor, and so do gate and up. They get one tensor in its place, whose gradient autograd adds up before it is summed
over the ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.backends.activations import sums
from deepspeed_compress.backends.activations.hooks import CompiledCalls, LayerHooks, TrainingPass
from deepspeed_compress.backends.activations.messages import activation_codec, gradient_codec
from deepspeed_compress.backends.activations.sums import TensorSum, sum_gradient, sum_output
from deepspeed_compress.backends.deepspeed.activations.attached import Attached, detach_with_engine, forbid_compiling
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.versions import column_forwards, row_forwards
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import TensorActivations
from deepspeed_compress.monitor import Meter, ring_all_reduce
from deepspeed_compress.session.patches import Patches

_LAYERS = "deepspeed.module_inject.layers:"
SEAMS = (
    Seam(_LAYERS + "LinearLayer.forward", "self input"),
    Seam(_LAYERS + "LinearAllreduce.forward", "self input"),
)


@dataclass(frozen=True)
class ExactSum:
    """DeepSpeed's all-reduce over `group`."""

    group: ProcessGroup

    def __call__(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, group=self.group)
        return total


def attach_tensor(engine: Any, settings: TensorActivations, run: Run, patches: Patches) -> None:
    """Take over the sums of split layers until the engine is destroyed, collected, or detached from."""
    model, bits, of_gradients = engine.module, settings.bits, settings.bits_of_gradients
    gradients: sums.SumOver = ExactSum
    hooks: list[Attached] = []
    detach_with_engine(engine, hooks, patches)
    compiled = forbid_compiling(engine, "/deepspeed_compress/activations/tensor", "sums", patches)
    if bits is not None and of_gradients is not None:
        gradients = sums.sums_over(gradient_codec(of_gradients), run)
        hooks += _take_over_rows(model, sums.sums_over(activation_codec(bits), run), compiled)
    for parent, layers in find_siblings(model):
        for readers in [layers] if settings.merge else [[layer] for layer in layers]:
            # A layer whose sum would be DeepSpeed's own is left alone.
            if len(readers) > 1 or bits is not None:
                hooks += _share(parent, readers, gradients(readers[0].mp_group), run, compiled)


def _share(
    parent: nn.Module, readers: Sequence[Any], total: sums.TensorSum, run: Run, compiled: CompiledCalls
) -> Iterator[Attached]:
    shared = SharedInput(total, run.meter, len(readers))
    if len(readers) > 1:
        shared.attach(parent)
        yield shared
    for layer in readers:
        hooks = ColumnHooks(layer, shared, compiled)
        # Before ZeRO 3 wraps the input for each layer.
        hooks.attach(layer, first=True)
        yield hooks


def _take_over_rows(model: nn.Module, sum_over: sums.SumOver, compiled: CompiledCalls) -> Iterator[Attached]:
    """Sum outputs by `sum_over` in training."""
    training = TrainingPass(model)
    yield training
    rows: list[Any] = list(filter(is_row, model.modules()))
    for layer in rows:
        hooks = RowHooks(layer, sum_over(layer.mp_group), training, compiled)
        hooks.attach(layer)
        yield hooks


def is_column(layer: nn.Module) -> bool:
    """Return True if `layer` is column-parallel: its input is whole, and its output stays split. Heads are excluded."""
    head = getattr(layer, "is_vocab_parallel_lm_head", False) or getattr(layer, "gather_output", False)
    return type(layer).forward in column_forwards() and not head and _is_split(layer)


def is_row(layer: nn.Module) -> bool:
    """Return True if `layer` is row-parallel: its input is split, and its output is summed. Heads are excluded."""
    return type(layer).forward in row_forwards() and _is_split(layer)


def _is_split(layer: Any) -> bool:
    return bool(layer.mp_group is not None and layer.tp_world_size > 1)


def sums_itself(layer: Any) -> bool:
    """Return True if `layer` sums in each call now. Hooks of another engine may have taken this call over already."""
    elsewhere = getattr(layer, "defer_collectives_to_compiler", False) or TensorParallel_Layer.tp_overlap_comm
    return layer.mp_group is not None and not elsewhere


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
            # Autograd keeps the sum, so it must not refer to tensors.
            readers: set[int] = set()
            replaced = sum_gradient(x, _SumForReaders(self.total, self.meter, readers))
            self._reading = _Reading(x, x._version, readers, replaced)
        reading = self._reading
        reading.readers.add(reader)
        if len(reading.readers) == self.layers:
            self._reading = None
        return reading.replaced

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
