"""The ladder: the sequence of softer and softer settings from a method to no compression."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config import GradientsConfig, patched

UNCOMPRESSED: Mapping[str, Any] = {"method": "none"}


def ladder(gradients: GradientsConfig) -> tuple[GradientsConfig, ...]:
    """Return `gradients`, followed by settings with less and less error; the last one is method "none"."""
    return tuple(_climb(gradients))


def _climb(gradients: GradientsConfig) -> Iterator[GradientsConfig]:
    while gradients.method != "none":
        yield gradients
        gradients = patched(gradients, gradients.softer() or UNCOMPRESSED)
    yield gradients
