"""Facts of an engine: its kind, its sizes, its parameters, which of them other ranks hold too, and its bucket sizes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_compress.backends.deepspeed.units import RankUnit, node_unit
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.model_families import user_name
from deepspeed_compress.session.patches import Patches


def engine_kind(engine: Any) -> str:
    """Return the seam of `engine`: "zero_3", "zero_12", or "zero_0" for every optimizer that all-reduces gradients."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return "zero_3"
    return "zero_12" if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) else "zero_0"


def has_optimizer(engine: Any) -> bool:
    """Return True if the engine has an optimizer with parameter groups, so that there are gradients to reduce.

    In bf16, DeepSpeed makes its `BF16_Optimizer` for engines without an optimizer, too.
    """
    stands_in = not getattr(engine.optimizer, "using_real_optimizer", True)
    return not stands_in and bool(getattr(engine.optimizer, "param_groups", None))


def tensor_size(engine: Any) -> int:
    """Return the number of ranks that share a layer, through AutoTP or a pipeline's topology."""
    parts = engine.mpu.count if isinstance(engine.mpu, RankUnit) else 1
    return int(dist.get_world_size() // (stage_count(engine) * parts * engine.seq_data_parallel_group.size()))


def stage_count(engine: Any) -> int:
    """Return the number of pipeline stages; 1 without a pipeline."""
    return int(engine.module.num_stages) if isinstance(engine, PipelineEngine) else 1


def shares_layers(engine: Any) -> bool:
    """Return True if ranks share layers in another way than by expert parallelism."""
    return isinstance(engine, PipelineEngine) or tensor_size(engine) > 1 or engine.sequence_parallel_size > 1


def shared_parameters(engine: Any) -> list[str]:
    """Return the names of parameters that must not be compressed because other data-parallel groups hold copies.

    Each group reduces its own copy. If the groups compressed them, in different buckets, the copies would drift apart.
    These are weights tied between pipeline stages and, under AutoTP, everything that it does not split.
    """
    shared: set[int] = set()
    if isinstance(engine, PipelineEngine):
        shared |= {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
    if tensor_size(engine) > 1:
        shared |= {id(one) for one in engine.module.parameters() if not is_model_parallel_parameter(one)}
    return [name for parameter, name in engine.param_names.items() if id(parameter) in shared]


def tied_copies(engine: Any) -> frozenset[str]:
    """Return the names of weights of this pipeline stage that are tied to those of an earlier stage."""
    if not isinstance(engine, PipelineEngine):
        return frozenset()
    tied = engine.module.get_tied_weights_and_groups()
    return frozenset(engine.param_names[weight] for weight, group in tied if group.rank() > 0)


def find_parameters(engine: Any) -> Parameters:
    """Return the model's parameters as reducers know them. Collective."""
    # Under ZeRO 3, this rank holds only a part of each parameter.
    shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for one, name in engine.param_names.items()}
    user_names = {name: user_name(parameter, name) for parameter, name in engine.param_names.items()}
    # Each pipeline stage has a part of the model, so only all of them together show whether an override matches
    # nothing.
    trained = {engine.param_names[parameter] for parameter in _trained(engine)}
    every_name = gather_objects([user_names[name] for name in user_names if name in trained])
    in_nodes = node_unit(engine) is not None
    dtype = engine.optimizer.gradient_accumulation_dtype if in_nodes else _RAW_DTYPE[engine_kind(engine)](engine)
    return Parameters(
        shapes=shapes,
        everywhere=sorted({name for some in every_name for name in some}),
        excluded=frozenset(shared_parameters(engine)),
        dtype=dtype,
        user_names=user_names,
        frozen=frozenset(engine.param_names.values()) - trained,
    )


def _trained(engine: Any) -> Iterator[Any]:
    """Yield the parameters whose gradients are reduced: those that ZeRO has taken, or all that require gradients."""
    groups = {"zero_12": "bit16_groups", "zero_3": "fp16_groups"}.get(engine_kind(engine))
    if groups is not None:
        return (parameter for group in getattr(engine.optimizer, groups) for parameter in group)
    return (parameter for parameter in engine.param_names if parameter.requires_grad)


_RAW_DTYPE: Mapping[str, Callable[[Any], torch.dtype]] = {
    # The bf16 optimizer reduces gradients in its gradient accumulation dtype.
    "zero_0": lambda engine: engine.get_data_types()[isinstance(engine.optimizer, BF16_Optimizer)],
    "zero_12": lambda engine: engine.communication_data_type,
    "zero_3": lambda engine: engine.get_data_types()[0],
}
"""Dtype of the gradients in DeepSpeed's buckets. Uncompressed elements are sent in it, so they are not rounded."""


BUCKETS = 8
"""Target number of gradient buckets per model. `SMALLEST_BUCKET` and `LARGEST_BUCKET` take precedence."""
SMALLEST_BUCKET, LARGEST_BUCKET = 1_000_000, 50_000_000


def bucket_size(numel: int) -> int:
    """Return the default bucket size, in elements, for a model with `numel` trained elements.

    It is small enough for the first buckets to travel during backward, and large enough to hide latency.
    """
    return min(max(numel // BUCKETS, SMALLEST_BUCKET), LARGEST_BUCKET)


def limit_bucket_size(engine: Any, numel: int, patches: Patches) -> None:
    """Let a ZeRO optimizer reduce in buckets of our default size, unless the file has a size.

    DeepSpeed's default of 500 million elements would send most models in one bucket, after backward.

    Args:
        engine: the engine.
        numel: the number of elements that the ranks of the engine train.
        patches: restores DeepSpeed's size.
    """
    written = engine.config.get("zero_optimization")
    if not isinstance(written, dict) or "reduce_bucket_size" not in written:
        patches.replace(engine.optimizer, "reduce_bucket_size", bucket_size(numel))
