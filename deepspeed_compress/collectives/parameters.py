"""Facts about the model that reducers need."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.collectives.low_rank import LowRank
from deepspeed_compress.config import PowerSGDGradients
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import AnyCompressedGradients
from deepspeed_compress.errors import CompressWarning


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


RAW = 0
"""Channel of uncompressed parameters; elements keep the gradient dtype."""
MAIN = 1
"""Channel of the chosen method. The channels of overrides follow it."""
GRADIENTS = "/deepspeed_compress/gradients"


def overrides_with_channel(settings: AnyCompressedGradients) -> list[Override]:
    """Return the overrides that have their own channel."""
    return [override for override in settings.overrides if not override.is_uncompressed]


def find_channels(parameters: Parameters, settings: AnyCompressedGradients) -> dict[str, int]:
    """Return the channel of every compressed parameter: that of the first matching override, else the method's.

    Parameters without a channel are sent uncompressed. Warns as described in `Reductions`.
    """
    excluded = {parameters.user_name(name) for name in parameters.excluded}
    _warn_about_unmatched(settings.overrides, [name for name in parameters.everywhere if name not in excluded])
    own, raw = overrides_with_channel(settings), parameters.uncompressed(settings.min_numel)
    found = {}
    for name in parameters.shapes:
        override = _first_match(settings.overrides, parameters.user_name(name))
        if name not in raw and not (override is not None and override.is_uncompressed):
            found[name] = MAIN if override is None else MAIN + 1 + own.index(override)
    _warn_if_uncompressed(settings, parameters, found)
    return found


def _first_match(overrides: Sequence[Override], name: str) -> Override | None:
    return next((override for override in overrides if re.search(override.parameters, name)), None)


def _warn_about_unmatched(overrides: Sequence[Override], names: Sequence[str]) -> None:
    """Emit a CompressWarning for each override that is not the first match of any of `names`."""
    used = {id(_first_match(overrides, name)) for name in names}
    for index, override in enumerate(overrides if names else ()):
        if id(override) not in used:
            warnings.warn(
                f"{GRADIENTS}/overrides/{index}/parameters: {override.parameters!r} matches none of the {len(names)} "
                f"parameters that are left for it (for example {names[0]!r}), so it has no effect; write a regular "
                "expression that is found in their names, or remove the override",
                CompressWarning,
                stacklevel=2,
            )


def _warn_if_uncompressed(settings: AnyCompressedGradients, parameters: Parameters, found: Mapping[str, int]) -> None:
    """Emit a CompressWarning if `settings` leave no parameter of this rank compressed."""
    low_rank = find_low_rank(settings, parameters, found) if isinstance(settings, PowerSGDGradients) else None
    saving = {name for name in found if low_rank is None or found[name] != MAIN or low_rank.saves(name)}
    if not saving.isdisjoint(parameters.trained) or not parameters.trained:
        return
    warnings.warn(
        f'{GRADIENTS}/method: "{settings.method}" compresses none of the {len(parameters.trained)} parameters of this '
        'rank. Write a smaller min_numel or rank, remove overrides, or set "method": "none".',
        CompressWarning,
        stacklevel=2,
    )


def find_low_rank(settings: PowerSGDGradients, parameters: Parameters, channel_of: Mapping[str, int]) -> LowRank:
    """Return the matrices of the main channel, and which of them have smaller factors."""
    shapes = {name: shape for name, shape in parameters.shapes.items() if channel_of.get(name, RAW) == MAIN}
    return LowRank(shapes, settings.rank)
