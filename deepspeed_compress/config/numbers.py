"""Consistent formats of numbers for readers: sizes, times, ratios, shares, counts."""

import math
from typing import Any

UNKNOWN = "-"
"""Text in place of a missing number."""


def finite(value: Any) -> Any:
    """Return `value` as JSON can express it: None for non-finite numbers, also in lists and objects."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: float | None, form: str, scale: float = 1.0, suffix: str = "") -> str:
    """Format `value` times `scale` for a table, with `suffix`; `UNKNOWN` if it is None or not finite."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(scale * value, form) + suffix


def size(count: float) -> str:
    """Format a number of bytes for a sentence, within 0.5 %: "1,024 bytes", "1.250 MB", "13.4 MB", "250 MB"."""
    if count < 1e5:
        return f"{count:,.0f} bytes"
    return megabytes(count) if count < 1e7 else f"{count / 1e6:,.{1 if count < 1e8 else 0}f} MB"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.3f} MB"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB"


def milliseconds(value: float) -> str:
    return f"{value:,.1f} ms"


def change(share: float | None) -> str:
    """Format a relative difference: 0.01 is "+1.00%"."""
    return shown(share, "+.2%")


def span(first: int, last: int) -> str:
    """Format the steps `first` to `last`."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def short(value: float) -> str:
    """Format `value` with four digits for an axis: "12.5k", "3M"."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.4g}"


def rounded(value: float) -> str:
    """Format any figure for a sentence: "1,234", "0.01235"."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
