"""Parameters that are treated differently: every method that messages can have, and whom it is for."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from deepspeed_compress.config import methods
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


class _Targets(Model):
    """Another treatment for the parameters whose name a pattern matches."""

    parameters: Pattern
    """Python regular expression, searched for anywhere in the parameter's name."""
    every: int = Field(default=1, ge=1)
    """Delayed synchronisation: these gradients are collected and sent in every N-th step alone, as their sum."""
    spread: bool = False
    """The optimizer gets that sum in N equal parts, one a step, and not at once."""


class NoneOverride(_Targets, methods.NoCompression):
    """Parameters that go uncompressed."""


class CastOverride(_Targets, methods.Cast):
    """Parameters sent as 16-bit floating-point numbers."""


class BlockwiseOverride(_Targets, methods.Blockwise):
    """Parameters sent as scaled integers."""

    model_config = NAMED


class LinearOverride(_Targets, methods.Linear):
    """Parameters sent as integers between minimum and maximum."""


class PercentileOverride(_Targets, methods.Percentile):
    """Parameters sent as clipped integers."""


class QSGDOverride(_Targets, methods.QSGD):
    """Parameters sent as stochastic levels."""


class FP8Override(_Targets, methods.FP8):
    """Parameters sent as 8-bit floating-point numbers."""


class SignOverride(_Targets, methods.Sign):
    """Parameters sent as signs."""


class TopKOverride(_Targets, methods.DensityWarmUp, methods.TopK):
    """Parameters of which the largest gradients are sent."""


class RandomKOverride(_Targets, methods.DensityWarmUp, methods.RandomK):
    """Parameters of which random gradients are sent."""


class BlockTopKOverride(_Targets, methods.DensityWarmUp, methods.BlockTopK):
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
