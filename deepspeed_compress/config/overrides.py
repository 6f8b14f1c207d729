"""Overrides: parameters that are treated differently, with every method that messages can have."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from deepspeed_compress.config import methods, sparse_methods
from deepspeed_compress.config.methods import NAMED, Model


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[
    str,
    Field(min_length=1, examples=["embed|norm|bias"], json_schema_extra={"format": "regex"}),
    AfterValidator(_regex),
]


class OverrideConfig(Model):
    """Other settings for the parameters whose names match a pattern."""

    parameters: Pattern
    """Python regular expression that is searched for anywhere in a parameter's name."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps between messages (delayed synchronization): the gradients of N steps are summed and sent in every
    N-th step. 1 sends in every step."""
    spread: bool = False
    """Pass that sum to the optimizer in N equal parts, one per step, instead of all at once."""

    @property
    def is_uncompressed(self) -> bool:
        """Return True if these parameters are sent uncompressed in every step."""
        return isinstance(self, methods.NoCompression) and self.every == 1


class NoneOverride(OverrideConfig, methods.NoCompression):
    """Parameters that are sent uncompressed."""


class CastOverride(OverrideConfig, methods.CastConfig):
    """Parameters sent as 16-bit floating-point numbers."""


class BlockwiseOverride(OverrideConfig, methods.BlockwiseConfig):
    """Parameters sent as scaled integers."""

    model_config = NAMED


class LinearOverride(OverrideConfig, methods.LinearConfig):
    """Parameters sent as integers between minimum and maximum."""


class PercentileOverride(OverrideConfig, methods.PercentileConfig):
    """Parameters sent as clipped integers."""


class QSGDOverride(OverrideConfig, methods.QSGDConfig):
    """Parameters sent as stochastic levels."""


class FP8Override(OverrideConfig, methods.FP8Config):
    """Parameters sent as 8-bit floating-point numbers."""


class SignOverride(OverrideConfig, methods.SignConfig):
    """Parameters sent as signs."""


class TopKOverride(OverrideConfig, sparse_methods.DensityWarmUp, sparse_methods.TopKConfig):
    """Parameters of which the largest gradients are sent."""


class RandomKOverride(OverrideConfig, sparse_methods.DensityWarmUp, sparse_methods.RandomKConfig):
    """Parameters of which random gradients are sent."""


class BlockTopKOverride(OverrideConfig, sparse_methods.DensityWarmUp, sparse_methods.BlockTopKConfig):
    """Parameters of which groups of gradients are sent."""


Override = Annotated[
    NoneOverride
    | CastOverride
    | BlockwiseOverride
    | LinearOverride
    | PercentileOverride
    | QSGDOverride
    | FP8Override
    | SignOverride
    | TopKOverride
    | RandomKOverride
    | BlockTopKOverride,
    Field(discriminator="method"),
]
