"""Times and rates as users write them: "30 s", "10 min", "50 MB/s", "200 Mbit/s"."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

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
