"""Checks of an engine before anything is attached to it. What one rank refuses, all ranks refuse."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from deepspeed_compress.backends.deepspeed import byte_counts, node_gradients, norms, seams, steps
from deepspeed_compress.backends.deepspeed.activations import experts, pipeline, sequence, tensor
from deepspeed_compress.backends.deepspeed.activations.attach import refuse_idle_activations
from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind
from deepspeed_compress.backends.deepspeed.limits import refuse_unsupported
from deepspeed_compress.backends.deepspeed.ownership import check_ownership
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, RankUnit, node_unit
from deepspeed_compress.backends.deepspeed.weights import master_weights
from deepspeed_compress.backends.deepspeed.weights.zero_3 import check_weights_3
from deepspeed_compress.backends.deepspeed.weights.zero_12 import check_weights
from deepspeed_compress.backends.limits import check_alike, check_torch
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.config import CompressConfig, check_world
from deepspeed_compress.errors import CompressError, ConfigError


@dataclass(frozen=True)
class _Stage:
    """Seams of a kind of engine.

    Attributes:
        gradient_seams: seams that the reduction of gradients needs.
        check_weights: raises UnsupportedError if weights cannot be compressed.
        weight_seams: seams that compressed weights need.
    """

    gradient_seams: tuple[seams.Seam, ...]
    check_weights: Callable[[Any], None] = check_weights
    weight_seams: tuple[seams.Seam, ...] = seams.WEIGHTS


_STAGES: Mapping[str, _Stage] = {
    "zero_0": _Stage(seams.ZERO_0),
    "zero_12": _Stage(seams.ZERO_12),
    "zero_3": _Stage(seams.ZERO_3, check_weights_3, seams.WEIGHTS_3),
}
"""Stages by kind of engine (see `engine_kind`)."""


def check_on_all_ranks(engine: Any, config: CompressConfig, island: IslandUnit | None) -> None:
    """Check that `engine` can be attached to. Collective: what one rank refuses, all ranks refuse.

    Stages of a pipeline differ, and no rank may wait for one that has stopped.
    """
    own: CompressError | None = None
    try:
        _check(engine, config, island)
    except CompressError as error:
        own = error
    every = gather_objects(own)
    refused = own or next((one for one in every if one is not None), None)
    if refused is not None:
        raise refused
    check_alike(config, engine.config)


def _check(engine: Any, config: CompressConfig, island: IslandUnit | None) -> None:
    """Check that `engine` can be attached to. Raises the errors of `attach`."""
    seams.check_version(deepspeed.__version__)
    check_torch(torch.__version__)
    check_world(config, dist.get_world_size(), engine.config)
    stage = _STAGES[engine_kind(engine)]
    refuse_unsupported(engine, config)
    refuse_idle_activations(engine, config)
    seams.check_seams(_used_seams(stage, config, node_unit(engine) is not None), deepspeed.__version__)
    if config.weights.method != "none":
        stage.check_weights(engine)
    islands, parallelism = config.islands, config.parallelism
    missing: type[RankUnit] | None = None
    if islands is not None and islands.elastic is None and island is None:
        missing = IslandUnit
    if parallelism is not None and parallelism.shard_within is not None and node_unit(engine) is None:
        missing = NodeUnit
    if missing is not None:
        raise ConfigError(
            f"{missing.pointer} divides ranks before an engine is made, but this engine already exists: use "
            "deepspeed_compress.initialize or install, or remove the key"
        )
    check_ownership(engine, config)


def _used_seams(stage: _Stage, config: CompressConfig, in_nodes: bool) -> Iterator[seams.Seam]:
    """Yield the seams that the section needs in an engine."""
    yield from seams.STEP + stage.gradient_seams + byte_counts.SEAMS
    if config.guard is not None or config.adaptive is not None:
        yield from norms.SEAMS + steps.LOSS_SEAMS
    if config.auto is not None:
        yield from steps.TIME_SEAMS
    if in_nodes or config.islands is not None:
        yield from master_weights.SEAMS
    if in_nodes:
        yield from node_gradients.SEAMS
    if config.activations is not None:
        yield from tensor.SEAMS + pipeline.SEAMS + sequence.SEAMS
        if config.activations.experts is not None:
            yield from experts.SEAMS
    if config.weights.method != "none":
        yield from stage.weight_seams
