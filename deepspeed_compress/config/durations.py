"""Times and rates as people write them: "30 s", "10 min", "50 MB/s", "200 Mbit/s"."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, Field

__all__ = ["BitRate", "ByteRate", "Duration", "bit_rate", "byte_rate", "seconds"]

_SECONDS: Mapping[str, float] = MappingProxyType({"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0})
_BYTES: Mapping[str, float] = MappingProxyType({"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9})
_BITS: Mapping[str, float] = MappingProxyType({"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9})


def seconds(text: str) -> float:
    """Seconds of "30 s", "10 min", "2 h" or "500 ms". Raises ValueError for anything else, and for no time at all."""
    return _amount(text, _SECONDS, '"30 s", "10 min", "2 h"')


def byte_rate(text: str) -> float:
    """Bytes a second of "50 MB/s". Raises ValueError for anything else, and for nothing at all."""
    return _amount(text, _BYTES, '"500 kB/s", "50 MB/s", "1 GB/s"')


def bit_rate(text: str) -> float:
    """Bits a second of "200 Mbit/s". Raises ValueError for anything else, and for nothing at all."""
    return _amount(text, _BITS, '"500 kbit/s", "200 Mbit/s", "1 Gbit/s"')


def _amount(text: str, units: Mapping[str, float], allowed: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)", text.strip())
    if found is None or found[2] not in units or not float(found[1]):
        raise ValueError(f'"{text}" is no such amount (allowed: {allowed})')
    return float(found[1]) * units[found[2]]


def _checked_seconds(text: str) -> str:
    seconds(text)
    return text


def _checked_rate(text: str) -> str:
    byte_rate(text)
    return text


def _checked_bits(text: str) -> str:
    bit_rate(text)
    return text


Duration = Annotated[str, AfterValidator(_checked_seconds), Field(examples=["30 s", "10 min"])]
ByteRate = Annotated[str, AfterValidator(_checked_rate), Field(examples=["50 MB/s"])]
BitRate = Annotated[str, AfterValidator(_checked_bits), Field(examples=["200 Mbit/s"])]
