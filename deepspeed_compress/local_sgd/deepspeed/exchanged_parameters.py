"""Selection of what islands exchange: all parameters except those that each island keeps to itself."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed_compress.backends.deepspeed.weights.copies import named_untrained
from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights, find_master_weights
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning, ConfigError
from deepspeed_compress.local_sgd.deepspeed.moments import find_second_moments
from deepspeed_compress.local_sgd.deepspeed.replicated import (
    SharedLayers,
    check_equal_blocks,
    check_tied,
    divide_replicated,
)
from deepspeed_compress.local_sgd.moments import SecondMoments

_POINTER = "/deepspeed_compress/islands/own"


@dataclass(frozen=True)
class ExchangedParameters:
    """Parameters that this rank exchanges with other islands.

    Attributes:
        master_weights: its share of the master weights. Ranks that share layers have different shares.
        parameters: the exchanged parameters, in fp32, with none excluded from compression.
        moments: second moments; None if they are not exchanged.
        untrained: parameters that islands neither train nor keep to themselves, so they are never exchanged.
    """

    master_weights: FlatMasterWeights
    parameters: Parameters
    moments: SecondMoments | None
    untrained: list[Parameter]


def find_exchanged(engine: Any, settings: Islands, parameters: Parameters, layers: SharedLayers) -> ExchangedParameters:
    """Return what this rank of `engine` exchanges. Collective in the island, whose ranks are those of `layers`.

    Raises:
        ConfigError: nothing is left to exchange.
        UnsupportedError: second moments or tied weights cannot be exchanged.
    """
    trained = find_master_weights(engine)
    master_weights, shared = _without_own(settings.own, trained, parameters)
    moments = find_second_moments(engine, settings, master_weights, layers.whole)
    if layers.stages > 1:
        check_tied(layers, has_moments=moments is not None)
    if layers.tensor > 1 and moments is not None:
        check_equal_blocks(master_weights, parameters, layers)
    if layers.hold_copies:
        master_weights = divide_replicated(master_weights, parameters, layers)
    names = {*chain(*gather_objects([one.parameter for one in trained.slices], layers.whole))}
    untrained = [one for name, one in named_untrained(engine, names) if not _matches(settings.own, name)]
    return ExchangedParameters(master_weights, shared, moments, untrained)


def _without_own(
    own: Sequence[str], master_weights: FlatMasterWeights, parameters: Parameters
) -> tuple[FlatMasterWeights, Parameters]:
    """Return `master_weights` and `parameters` without the parameters that each island keeps to itself.

    Warns (CompressWarning) of each pattern that matches no parameter.

    Args:
        own: regular expressions, searched for in the names of parameters. Matching parameters are not exchanged.
        master_weights: the master weights of this rank.
        parameters: the parameters of the engine.

    Returns:
        The remaining master weights, and the remaining parameters for exchanges, in fp32, with none excluded from
        compression.

    Raises:
        ConfigError: nothing is left to exchange.
    """
    _check(own, parameters.everywhere)
    left = {name: shape for name, shape in parameters.shapes.items() if not _matches(own, parameters.user_name(name))}
    everywhere = [name for name in parameters.everywhere if not _matches(own, name)]
    kept, stepped = (
        [one for one in some if one.parameter in left] for some in (master_weights.slices, master_weights.stepped)
    )
    return (
        replace(master_weights, slices=kept, stepped=stepped),
        replace(parameters, shapes=left, everywhere=everywhere, excluded=frozenset(), dtype=torch.float32),
    )


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Return True if one of the `patterns` of `own` is found in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def _check(own: Sequence[str], names: Sequence[str]) -> None:
    if names and all(_matches(own, name) for name in names):
        raise ConfigError(
            f"{_POINTER}: {list(own)} names all {len(names)} parameters, so nothing is exchanged (allowed: some of "
            f"them, for example {names[0]!r}); name fewer, or remove islands"
        )
    for index, pattern in enumerate(own):
        if not any(re.search(pattern, name) for name in names):
            warnings.warn(
                f"{_POINTER}/{index}: {pattern!r} matches none of the {len(names)} parameters (for example "
                f"{next(iter(names), '')!r}), so it has no effect; write a regular expression that is found in their "
                "names, or remove it",
                CompressWarning,
                stacklevel=2,
            )
