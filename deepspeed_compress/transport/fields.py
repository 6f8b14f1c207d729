"""Tables of valid messages: their kinds, the fields of each kind, and the values of each field."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_compress.transport.errors import ProtocolError
from deepspeed_compress.transport.frames import Head

Check = Callable[[Any], bool]
Table = Mapping[str, Mapping[str, Check]]
"""Checks of the fields of each kind. A missing field is None; a field without a check is ignored."""
_SHOWN = 40


def check_message(head: Head, table: Table) -> None:
    """Raise ProtocolError, with the name of the field, if `head` is not what `table` allows."""
    fields = table.get(head["kind"])
    if fields is None:
        raise ProtocolError(f"unknown kind of message: {head['kind'][:_SHOWN]!r}")
    for name, is_valid in fields.items():
        value = head.get(name)
        if not is_valid(value):
            raise ProtocolError(f"{head['kind']}: {name} is {repr(value)[:_SHOWN]}")


def an_integer(least: int, most: int) -> Check:
    """Return a check for an integer from `least` to `most`. True and False are not integers."""
    return lambda value: type(value) is int and least <= value <= most


def a_number(least: float, most: float = math.inf) -> Check:
    """Return a check for a number from `least` to `most`."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def a_text(most: int, least: int = 0) -> Check:
    """Return a check for a string of `least` to `most` characters."""
    return lambda value: isinstance(value, str) and least <= len(value) <= most


def a_boolean(value: Any) -> bool:
    """Return True if `value` is True or False."""
    return isinstance(value, bool)


def a_mapping(value: Any) -> bool:
    """Return True if `value` is an object."""
    return isinstance(value, dict)


def every(check: Check, most: int) -> Check:
    """Return a check for a list of at most `most` values that all fit `check`."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def optional(check: Check) -> Check:
    """Return a check that also accepts None, and a missing field."""
    return lambda value: value is None or check(value)
