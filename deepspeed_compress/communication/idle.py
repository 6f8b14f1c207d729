"""Warnings of settings that a model leaves without effect."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

from deepspeed_compress.errors import CompressWarning

__all__ = ["warn_of_idle", "warn_of_nothing"]

GRADIENTS = "/deepspeed_compress/gradients"


def warn_of_nothing(settings: Any, compressed: Sequence[str], count: int) -> None:
    """CompressWarning when `settings` of gradients leave none of the `count` parameters of a rank `compressed`."""
    if compressed or not count:
        return
    reasons = [f"min_numel {settings.min_numel}"] if settings.min_numel else []
    if hasattr(settings, "rank"):
        reasons.append(f"rank {settings.rank}, at which factors are no smaller than matrices")
    reasons += ["overrides"] if settings.overrides else []
    reasons.append("copies of parameters on ranks outside the data-parallel group")
    warnings.warn(
        f'{GRADIENTS}/method: "{settings.method}" compresses none of the {count} parameters of this rank, because of '
        f'{" or ".join(reasons)}. Write smaller values, fewer overrides, or "method": "none".',
        CompressWarning,
        stacklevel=4,
    )


def warn_of_idle(overrides: Sequence[Any], names: Sequence[str]) -> None:
    """CompressWarning for every override that is the first match of none of `names`."""
    matches = [[bool(re.search(override.parameters, name)) for override in overrides] for name in names]
    used = {found.index(True) for found in matches if any(found)}
    for index, override in enumerate(overrides if names else ()):
        if index not in used:
            warnings.warn(
                f"{GRADIENTS}/overrides/{index}/parameters: {override.parameters!r} matches none of the {len(names)} "
                f"parameters that are left for it (for example {names[0]!r}), so it has no effect; write a regular "
                "expression that is found in their names, or remove the override",
                CompressWarning,
                stacklevel=5,
            )
