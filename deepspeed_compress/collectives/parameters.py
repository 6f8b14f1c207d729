"""Facts about the model that reducers need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Parameters:
    """Facts about the model that reducers need.

    Attributes:
        shapes: shapes of this rank's parameters, by name.
        everywhere: user-facing names of the parameters of all ranks.
        excluded: names of parameters that must stay uncompressed, whatever the configuration says.
        frozen: names of parameters that are not trained, so that they have no gradients.
        dtype: dtype of the gradients, and of uncompressed elements in messages.
        user_names: user-facing names of the parameters for which it differs from the internal name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    everywhere: Sequence[str]
    excluded: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    user_names: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    @cached_property
    def widths(self) -> dict[str, int]:
        """Return the row length of each matrix. All dimensions after the first are flattened into one."""
        return {name: int(torch.Size(shape[1:]).numel()) for name, shape in self.shapes.items() if len(shape) > 1}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the trained parameters, in order."""
        return tuple(name for name in self.shapes if name not in self.frozen)

    def numel(self, name: str) -> int:
        return int(torch.Size(self.shapes[name]).numel())

    def user_name(self, name: str) -> str:
        """Return the name that the patterns of overrides are matched against."""
        return self.user_names.get(name, name)

    def uncompressed(self, min_numel: int) -> frozenset[str]:
        """Return the excluded parameters and those with fewer than `min_numel` elements."""
        return self.excluded | {name for name in self.shapes if self.numel(name) < min_numel}


def is_plain(parameter: Tensor) -> bool:
    """Return True if the elements are the values: no subclass interprets them, and no state describes their packing."""
    return type(parameter) in (Tensor, Parameter) and getattr(parameter, "quant_state", None) is None
