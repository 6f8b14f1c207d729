"""What islands exchange of a model: all but the parameters that each keeps for itself."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepspeed_compress.communication.reduction import Parameters
from deepspeed_compress.engine.weights.masters import FlatMasters
from deepspeed_compress.errors import CompressWarning, ConfigError

__all__ = ["exchanged", "matches"]

_POINTER = "/deepspeed_compress/islands/own"


def exchanged(own: Sequence[str], masters: FlatMasters, parameters: Parameters) -> tuple[FlatMasters, Parameters]:
    """`masters` without the parameters that one of the patterns `own` is found in, and what exchanges must know of the
    others: in fp32, none exempt.

    Warns (CompressWarning) of a pattern that is found in none. ConfigError where nothing is left.
    """
    _check(own, parameters.everywhere)
    left = {name: shape for name, shape in parameters.shapes.items() if not matches(own, parameters.user_name(name))}
    everywhere = [name for name in parameters.everywhere if not matches(own, name)]
    kept, stepped = ([one for one in some if one.parameter in left] for some in (masters.stretches, masters.stepped))
    return (
        replace(masters, stretches=kept, stepped=stepped),
        replace(parameters, shapes=left, everywhere=everywhere, exempt=frozenset(), dtype=torch.float32),
    )


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the `patterns` of `own` is found in `name`."""
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
