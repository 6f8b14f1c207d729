"""Weights and settings of islands of one rank, without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import Islands
from deepspeed_compress.local_sgd.round_peers import group_of_one
from deepspeed_compress.local_sgd.strategy import ExchangeContext, IslandRanks
from deepspeed_compress.monitor import Meter

NUMEL = 700
INT4 = {"method": "blockwise", "bits": 4}
EXACT = {"method": "none"}


@dataclass
class Weights:
    """Weights of a rank that an exchange reads and replaces (`MasterWeights`)."""

    values: Tensor
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def segments(self) -> Sequence[Segment]:
        return (Segment("w", 0, NUMEL, 0, 0),)

    def read(self, segments: Sequence[Segment]) -> Tensor:
        return self.values.clone()

    def write(self, segments: Sequence[Segment], values: Tensor) -> None:
        self.values.copy_(values)

    def publish(self) -> None: ...


def context_of(settings: Islands, weights: Weights, stores: ResidualStores, meter: Meter) -> ExchangeContext:
    """Return the inputs of the exchanges of an island of one rank."""
    parameters, run = Parameters({"w": (NUMEL,)}, ["w"]), Run(StepClock(), meter)
    alone = ReductionContext(Groups(group_of_one()), parameters, stores, run, traffic="bytes_islands")
    return ExchangeContext(settings, weights, alone, IslandRanks())
