"""Checks of `activations` that need the engine or its model."""

from collections.abc import Iterator
from typing import Any

from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from deepspeed_compress.backends.deepspeed.activations.column import find_siblings
from deepspeed_compress.backends.deepspeed.activations.layers import is_column, is_row
from deepspeed_compress.backends.deepspeed.limits import tensor_size
from deepspeed_compress.config import CompressConfig, TensorActivations
from deepspeed_compress.errors import UnsupportedError

_PLACE = "/deepspeed_compress/activations/"


def refuse_idle_activations(engine: Any, config: CompressConfig) -> None:
    """Check that `activations` has an effect on `engine`, and that its layers can be taken over.

    Raises:
        UnsupportedError: it has none, or they cannot.
    """
    activations = config.activations
    if activations is None:
        return
    pipeline = isinstance(engine, PipelineEngine) and engine.num_stages > 1
    problems = [] if activations.tensor is None else list(_tensor_problems(engine, activations.tensor))
    if activations.pipeline is not None and not pipeline:
        problems.append(f"{_PLACE}pipeline has no effect on an engine without pipeline stages; remove the key")
    if activations.sequence is not None:
        problems += _sequence_problems(engine)
    if problems:
        raise UnsupportedError("; ".join(problems))


def _tensor_problems(engine: Any, settings: TensorActivations) -> Iterator[str]:
    place, modules = f"{_PLACE}tensor", list(engine.module.modules())
    split = any(is_column(module) or is_row(module) for module in modules)
    if tensor_size(engine) == 1:
        yield f"{place} has no effect, because no ranks share layers; train with tensor parallelism, or remove the key"
    elif not split and not isinstance(engine, PipelineEngine):  # a stage may have no decoder layers
        yield f"{place} has no effect, because AutoTP has split no layer of this model; remove the key"
    elif split and settings.bits is None and all(len(layers) == 1 for _, layers in find_siblings(engine.module)):
        yield f'{place}/merge has no effect, because no layers of this model read one tensor; add "bits": 8'
    if TensorParallel_Layer.tp_overlap_comm:
        yield f"{place}: tensor_parallel.tp_overlap_comm sums gradients in another way; write false"
    if _is_compiled_anywhere(engine):
        yield f"{place}: sums inside a compiled graph cannot be taken over; do not compile the model, or remove the key"


def _sequence_problems(engine: Any) -> Iterator[str]:
    place = f"{_PLACE}sequence"
    if engine.sequence_parallel_size == 1:
        yield f"{place} has no effect, because no ranks share sequences; pass Ulysses' mpu or mesh, or remove the key"
    if isinstance(engine, PipelineEngine):
        yield f"{place} is not available with pipeline stages; remove the key"
    if _is_compiled_anywhere(engine):
        yield f"{place}: passes of a compiled model cannot be followed; do not compile the model, or remove the key"


def refuse_to_compile(key: str, *_: Any, **__: Any) -> None:
    """Refuse `engine.compile()`, since messages of `key` inside a compiled graph cannot be taken over.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{_PLACE}{key}: messages inside a compiled graph cannot be taken over; do not call engine.compile(), or "
        "remove the key"
    )


def _is_compiled_anywhere(engine: Any) -> bool:
    return engine.is_compiled or any(map(_is_compiled, engine.module.modules()))


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
