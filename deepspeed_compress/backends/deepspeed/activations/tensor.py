"""Sums of tensor parallelism: fewer of them in the backward pass, and compressed ones in both passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations import sums
from deepspeed_compress.backends.activations.compiled import CompiledCalls
from deepspeed_compress.backends.activations.hooks import TrainingPass
from deepspeed_compress.backends.deepspeed.activations.attached import Attached, detach_with_engine, forbid_compiling
from deepspeed_compress.backends.deepspeed.activations.column import ColumnHooks, SharedInput, find_siblings
from deepspeed_compress.backends.deepspeed.activations.layers import is_row
from deepspeed_compress.backends.deepspeed.activations.row import RowHooks
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import TensorActivations
from deepspeed_compress.session.patches import Patches

_LAYERS = "deepspeed.module_inject.layers:"
SEAMS = (
    Seam(_LAYERS + "LinearLayer.forward", ("self", "input")),
    Seam(_LAYERS + "LinearAllreduce.forward", ("self", "input")),
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
        gradients = sums.sums_over(sums.gradient_codec(of_gradients), run)
        hooks += _take_over_rows(model, sums.sums_over(sums.activation_codec(bits), run), compiled)
    hooks += _take_over_columns(model, gradients, settings, run, compiled)


def _take_over_columns(
    model: nn.Module, sum_over: sums.SumOver, settings: TensorActivations, run: Run, compiled: CompiledCalls
) -> Iterator[Attached]:
    """Sum the gradients of inputs by `sum_over`. A layer whose sum would be DeepSpeed's own is left alone."""
    for parent, layers in find_siblings(model):
        merged = [layers] if settings.merge else [[layer] for layer in layers]
        for readers in merged:
            if len(readers) > 1 or settings.bits is not None:
                yield from _share(parent, readers, sum_over(readers[0].mp_group), run, compiled)


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
