"""Partitioning of the layers of a pipeline into stages."""

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.models.layers import DecoderLayer, Embedding, Prologue

Partition = Callable[[Sequence[Any], int], list[int]]
"""Function of (layers, stages) to stages + 1 bounds; stage i has the layers in range(bounds[i], bounds[i + 1])."""

LOOKUP = 0.1
"""Relative cost of a weight in a lookup table, which is reduced and updated but not used in a matrix multiplication."""


def partition_by(method: str | tuple[int, ...]) -> Partition:
    """Return the partition for "balanced", "parameters", "uniform", or the number of decoder layers per stage."""
    return _METHODS[method] if isinstance(method, str) else _by_counts(method)


def _balanced(layers: Sequence[Any], stages: int) -> list[int]:
    """Balance the multiplications: the head costs as much as its weight, and the embedding almost nothing."""
    costs = [_parameters(layer) * (LOOKUP if _is_lookup(layer) else 1.0) for layer in layers]
    return _cut(costs, stages)


def _by_parameters(layers: Sequence[Any], stages: int) -> list[int]:
    return _cut([_parameters(layer) for layer in layers], stages)


def _uniform(layers: Sequence[Any], stages: int) -> list[int]:
    return _cut([float(isinstance(layer, DecoderLayer)) for layer in layers], stages)


_METHODS = {"balanced": _balanced, "parameters": _by_parameters, "uniform": _uniform}


def _by_counts(counts: tuple[int, ...]) -> Partition:
    """Return a partition with `counts` decoder layers per stage.

    The first stage also gets everything before the decoder layers and the last stage everything after them, so only
    these two may have no decoder layers.
    """

    def cut(layers: Sequence[Any], stages: int) -> list[int]:
        decoders = [index for index, layer in enumerate(layers) if isinstance(layer, DecoderLayer)]
        if len(counts) != stages or sum(counts) != len(decoders) or 0 in counts[1:-1]:
            raise ConfigError(
                f"/deepspeed_compress/parallelism/partition: {list(counts)} (allowed: {stages} numbers, one per stage, "
                f"with a sum of {len(decoders)} decoder layers; only the first and the last stage may have 0). Write "
                'such numbers, or "balanced".'
            )
        starts = [decoders[0] + sum(counts[:stage]) for stage in range(1, stages)]
        return [0, *starts, len(layers)]

    return cut


def _cut(costs: Sequence[float], stages: int) -> list[int]:
    # DeepSpeed's search needs integers.
    return [int(bound) for bound in partition_balanced([round(cost * 10) for cost in costs], stages)]


def _parameters(layer: Any) -> float:
    module = layer.module_args[0] if isinstance(layer, TiedLayerSpec) else layer
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _is_lookup(layer: Any) -> bool:
    if isinstance(layer, TiedLayerSpec):
        return layer.forward_fn is None
    return isinstance(layer, Embedding | Prologue)
