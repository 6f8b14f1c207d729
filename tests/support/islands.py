"""Weights and settings of islands of one rank, without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_compress.compression.segments import Segment

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
