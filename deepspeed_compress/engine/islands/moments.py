"""Where DeepSpeed keeps the second moments of Adam under each ZeRO stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.communication.moments import Moments
from deepspeed_compress.config import Islands
from deepspeed_compress.engine.weights.masters import FlatMasters, Stretch
from deepspeed_compress.errors import UnsupportedError

__all__ = ["find_moments"]

_POINTER = "/deepspeed_compress/islands/second_moments"
_KEY = "exp_avg_sq"
"""In the state of torch.optim.Adam, of DeepSpeed's FusedAdam and CPUAdam, and of all that are made after them."""


def find_moments(engine: Any, settings: Islands, masters: FlatMasters) -> Moments | None:
    """Those of what the rank steps; None where islands do not exchange them."""
    if settings.second_moments is None:
        return None
    found = _States(engine.basic_optimizer, masters.stepped)
    return Moments(found.views, settings.second_moments.block_size, masters.device)


@dataclass(frozen=True)
class _States:
    optimizer: Any
    stepped: Sequence[Stretch]

    def views(self) -> list[Tensor]:
        """A flat view for every stretch. UnsupportedError where the optimizer has no second moments, or keeps them
        elsewhere."""
        return [self._view(one, self.optimizer.state.get(one.home, {})) for one in self.stepped]

    def _view(self, one: Stretch, state: Mapping[str, Any]) -> Tensor:
        if not state:
            # Not stepped yet.
            return torch.zeros(one.numel, device=one.home.device)
        moments = state.get(_KEY)
        if not isinstance(moments, Tensor) or moments.numel() != one.home.numel():
            raise UnsupportedError(
                f"{_POINTER}: the state of {type(self.optimizer).__name__} has {sorted(state)}, and no {_KEY} of every "
                'weight in memory (allowed: the family of Adam, not on NVMe); write "second_moments": null'
            )
        return one.within(moments)
