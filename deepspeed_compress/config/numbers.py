"""Numbers as users write them, such as "30 s" and "50 MB/s", and in consistent formats for readers."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_SECONDS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES: Mapping[str, float] = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_BITS: Mapping[str, float] = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}


def seconds(text: str) -> float:
    """Return the seconds of "30 s", "10 min", "2 h" or "500 ms". Raises ValueError for anything else."""
    return _amount(text, _SECONDS, 'a time (allowed: "30 s", "10 min", "2 h")')


def byte_rate(text: str) -> float:
    """Return the bytes per second of "50 MB/s". Raises ValueError for anything else."""
    return _amount(text, _BYTES, 'a rate in bytes (allowed: "500 kB/s", "50 MB/s", "1 GB/s")')


def bit_rate(text: str) -> float:
    """Return the bits per second of "200 Mbit/s". Raises ValueError for anything else."""
    return _amount(text, _BITS, 'a rate in bits (allowed: "500 kbit/s", "200 Mbit/s", "1 Gbit/s")')


def _amount(text: str, units: Mapping[str, float], wanted: str) -> float:
    # Clocks, sockets and locks do not accept times of more digits.
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([A-Za-z/]+)", text.strip())
    if found is None or found[2] not in units or not float(found[1]):
        raise ValueError(f'"{text}" is not {wanted}')
    return float(found[1]) * units[found[2]]


def _checked(read: Callable[[str], float], text: str) -> str:
    read(text)
    return text


Duration = Annotated[str, AfterValidator(partial(_checked, seconds)), Field(examples=["30 s", "10 min"])]
ByteRate = Annotated[str, AfterValidator(partial(_checked, byte_rate)), Field(examples=["50 MB/s"])]
BitRate = Annotated[str, AfterValidator(partial(_checked, bit_rate)), Field(examples=["200 Mbit/s"])]


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
