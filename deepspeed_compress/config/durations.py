"""Times and rates as users write them: "30 s", "10 min", "50 MB/s", "200 Mbit/s"."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

_SECONDS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES: Mapping[str, float] = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_BITS: Mapping[str, float] = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}


@dataclass(frozen=True)
class _Range:
    """Amounts from `least` to `most`, with texts for users.

    Clocks, sockets and locks do not accept longer times, and no link has a higher rate.
    """

    name: str
    least: float
    most: float
    allowed: str
    examples: str


_TIMES = _Range("a time", 1e-3, 8760 * 3600.0, '"1 ms" to "8760 h"', '"30 s", "10 min", "2 h"')
_BYTE_RATES = _Range("a rate in bytes", 1.0, 1e15, "1 B/s to 1e15 B/s", '"500 kB/s", "50 MB/s", "1 GB/s"')
_BIT_RATES = _Range("a rate in bits", 1.0, 1e16, "1 bit/s to 1e16 bit/s", '"500 kbit/s", "200 Mbit/s", "1 Gbit/s"')


def seconds(text: str) -> float:
    """Return the seconds of "30 s", "10 min", "2 h" or "500 ms". Raises ValueError for anything else."""
    return _amount(text, _SECONDS, _TIMES)


def byte_rate(text: str) -> float:
    """Return the bytes per second of "50 MB/s". Raises ValueError for anything else."""
    return _amount(text, _BYTES, _BYTE_RATES)


def bit_rate(text: str) -> float:
    """Return the bits per second of "200 Mbit/s". Raises ValueError for anything else."""
    return _amount(text, _BITS, _BIT_RATES)


def _amount(text: str, units: Mapping[str, float], within: _Range) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)", text.strip())
    if found is None or found[2] not in units or not float(found[1]):
        raise ValueError(f'"{text}" is not {within.name} (allowed: {within.examples})')
    amount = float(found[1]) * units[found[2]]
    if not within.least <= amount <= within.most:
        raise ValueError(f'"{text}" is out of range (allowed: {within.allowed}, such as {within.examples})')
    return amount


def _checked(read: Callable[[str], float], text: str) -> str:
    read(text)
    return text


Duration = Annotated[str, AfterValidator(partial(_checked, seconds)), Field(examples=["30 s", "10 min"])]
ByteRate = Annotated[str, AfterValidator(partial(_checked, byte_rate)), Field(examples=["50 MB/s"])]
BitRate = Annotated[str, AfterValidator(partial(_checked, bit_rate)), Field(examples=["200 Mbit/s"])]
