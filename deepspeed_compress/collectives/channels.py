"""Channel of each parameter in a message: uncompressed, that of the method, or that of an override."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_compress.collectives.low_rank import LowRank
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import PowerSGDGradients
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import AnyCompressedGradients
from deepspeed_compress.errors import CompressWarning

RAW = 0
"""Channel of uncompressed parameters; elements keep the gradient dtype."""
MAIN = 1
"""Channel of the chosen method. The channels of overrides follow it."""
GRADIENTS = "/deepspeed_compress/gradients"


@dataclass(frozen=True, eq=False)
class ChannelTable:
    """Map from parameter name to channel. Parameters that are not in it are sent uncompressed."""

    channel_of: Mapping[str, int]


def overrides_with_channel(settings: AnyCompressedGradients) -> list[Override]:
    """Return the overrides that have their own channel."""
    return [override for override in settings.overrides if not override.is_uncompressed]


def find_channels(parameters: Parameters, settings: AnyCompressedGradients) -> ChannelTable:
    """Return the channel of every compressed parameter: that of the first matching override, else the method's.

    Warns as described in `Reductions`.
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
    return ChannelTable(found)


def _first_match(overrides: Sequence[Override], name: str) -> Override | None:
    return next((one for one in overrides if re.search(one.parameters, name)), None)


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
    reasons = [f"min_numel {settings.min_numel}"] if settings.min_numel else []
    if low_rank is not None:
        reasons.append(f"rank {low_rank.rank}, at which factors are no smaller than matrices")
    reasons += ["overrides"] if settings.overrides else []
    reasons.append("copies of parameters on ranks outside the data-parallel group")
    warnings.warn(
        f'{GRADIENTS}/method: "{settings.method}" compresses none of the {len(parameters.trained)} parameters '
        f'of this rank, because of {" or ".join(reasons)}. Write smaller values, remove overrides, or set "method": '
        '"none".',
        CompressWarning,
        stacklevel=2,
    )


def find_low_rank(settings: PowerSGDGradients, parameters: Parameters, channel_of: Mapping[str, int]) -> LowRank:
    """Return the matrices of the main channel, and which of them have smaller factors."""
    shapes = {name: shape for name, shape in parameters.shapes.items() if channel_of.get(name, RAW) == MAIN}
    return LowRank(shapes, settings.rank)
