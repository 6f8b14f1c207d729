"""From the settings of a method, step by step, to no compression: what "softer" means."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config import GradientsConfig, patched

__all__ = ["ladder"]

UNCOMPRESSED: Mapping[str, Any] = {"method": "none"}


def ladder(gradients: GradientsConfig) -> tuple[GradientsConfig, ...]:
    """`gradients`, then settings each of which loses less than the one before, the last of them method "none"."""
    return tuple(_climb(gradients))


def _climb(gradients: GradientsConfig) -> Iterator[GradientsConfig]:
    while gradients.method != "none":
        yield gradients
        gradients = patched(gradients, gradients.softer() or UNCOMPRESSED)
    yield gradients
