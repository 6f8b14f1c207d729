"""From the settings of a method, step by step, to no compression: what "softer" means."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed_compress.config import patched

__all__ = ["ladder"]

UNCOMPRESSED: Mapping[str, Any] = {"method": "none"}


def ladder(gradients: Any) -> tuple[Any, ...]:
    """`gradients`, then settings each of which loses less than the one before, the last of them method "none"."""
    return tuple(_climb(gradients))


def _climb(gradients: Any) -> Iterator[Any]:
    while gradients.method != "none":
        yield gradients
        gradients = patched(gradients, next(filter(None, (softer(gradients) for softer in _SOFTER)), UNCOMPRESSED))
    yield gradients


def _more_of_it(gradients: Any) -> Mapping[str, Any] | None:
    """Four times the density, up to a quarter; beyond that indices cost more than they save."""
    density = getattr(gradients, "density", None)
    return None if density is None or density >= 0.25 else {"density": min(0.25, 4 * density)}


def _more_bits(gradients: Any) -> Mapping[str, Any] | None:
    bits = getattr(gradients, "bits", None)
    return None if bits is None or bits >= 8 else {"bits": 2 * bits}


def _more_levels(gradients: Any) -> Mapping[str, Any] | None:
    levels = getattr(gradients, "levels", None)
    return None if levels is None or levels >= 127 else {"levels": 127}


def _higher_rank(gradients: Any) -> Mapping[str, Any] | None:
    rank = getattr(gradients, "rank", None)
    return None if rank is None or rank >= 16 else {"rank": min(16, 4 * rank)}


def _from_signs(gradients: Any) -> Mapping[str, Any] | None:
    return {"method": "blockwise", "bits": 4} if gradients.method == "sign" else None


_SOFTER: tuple[Callable[[Any], Mapping[str, Any] | None], ...] = (
    _more_of_it,
    _more_bits,
    _more_levels,
    _higher_rank,
    _from_signs,
)
