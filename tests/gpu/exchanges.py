"""Steps of each method between this rank and its mirror image."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.collectives.buckets import Partition, even_partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext, Reductions
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.monitor import Meter
from deepspeed_compress.tools.bench.mirror import Mirror

_RANKS = 2
_ROWS: Mapping[str, int] = {"cuda": 2048, "cpu": 64}
_COLUMNS = 512


@dataclass(frozen=True)
class _Place:
    """Bucket of two matrices, each owned by one rank, so that all messages have the same length and can be mirrored."""

    context: ReductionContext
    bucket: Tensor
    partition: Partition


def _make_place(device: str) -> _Place:
    shapes = dict.fromkeys(("first", "second"), (_ROWS[device], _COLUMNS))
    sizes = [(name, rows * columns) for name, (rows, columns) in shapes.items()]
    run = Run(StepClock(), Meter(timed=False))
    context = ReductionContext(Groups(Mirror(0, _RANKS)), Parameters(shapes, list(shapes)), ResidualStores(False), run)
    partition = even_partition(sizes, _RANKS)
    generator = torch.Generator(device).manual_seed(0)
    return _Place(context, torch.randn(partition.numel, generator=generator, device=device), partition)


def exchange_gradients(section: Mapping[str, Any], device: str) -> Callable[[], object]:
    """Return a step with `section` under `gradients`: a reduce-scatter, an all-reduce and the update of residuals."""
    gradients: Any = parse_section({SECTION: {"gradients": dict(section)}}).gradients
    place, steps = _make_place(device), count()
    reductions, clock = Reductions(place.context), place.context.run.clock

    def step() -> None:
        clock.begin(next(steps))
        reducer = reductions.at(gradients, clock.step).compressed
        reducer.reduce_scatter(place.bucket.clone(), place.partition, 1 / _RANKS)
        reducer.all_reduce(place.bucket.clone(), place.partition, 1 / _RANKS)
        for store in place.context.stores.by_name.values():
            store.commit()

    return step


def exchange_weights(section: Mapping[str, Any], device: str) -> Callable[[], object]:
    """Return a step with `section` under `weights`: gathering differences as in ZeRO 1 and 2."""
    weights: Any = parse_section({SECTION: {"weights": dict(section)}}).weights
    place, steps = _make_place(device), count()
    reduction = WeightReduction(weights, place.context.parameters, place.context.run)
    sizes = [(segment.parameter, segment.numel) for segment in place.partition.segments]
    gather = reduction.difference_gather(place.context.groups.whole, sizes, torch.bfloat16)
    held = place.bucket.to(torch.bfloat16)
    master = gather.own(place.bucket).clone()

    def step() -> None:
        place.context.run.clock.begin(next(steps))
        gather.gather(held, master)

    return step
