"""Selection of the parameters that islands exchange: all except those that each island keeps to itself."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.errors import CompressWarning, ConfigError

_POINTER = "/deepspeed_compress/islands/own"


def select_exchanged(
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
    left = {name: shape for name, shape in parameters.shapes.items() if not matches(own, parameters.user_name(name))}
    everywhere = [name for name in parameters.everywhere if not matches(own, name)]
    kept, stepped = (
        [one for one in some if one.parameter in left] for some in (master_weights.slices, master_weights.stepped)
    )
    return (
        replace(master_weights, slices=kept, stepped=stepped),
        replace(parameters, shapes=left, everywhere=everywhere, excluded=frozenset(), dtype=torch.float32),
    )


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return True if one of the `patterns` of `own` is found in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def _check(own: Sequence[str], names: Sequence[str]) -> None:
    if names and all(matches(own, name) for name in names):
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
