"""Frames: a fixed header with two sizes, a head (one strict JSON object with a `kind`), and a body of plain bytes.

The sizes are checked against limits before memory is allocated. A strict head is UTF-8, without lone surrogates, with
finite numbers, integers below 2**63, and nesting of at most `DEPTH`; any other is a ProtocolError.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.transport.errors import ProtocolError

Head = Mapping[str, Any]
HEADER = struct.Struct("!4sIQ")
"""Magic bytes, size of the head, size of the body."""
DEPTH = 16
"""Deepest nesting of lists and objects in a head."""
_MAGIC = b"DSCF"
_LARGEST = 1 << 63
_DIGITS = len(str(_LARGEST)) + 1


@dataclass(frozen=True)
class Limits:
    """Limits of what one side accepts from the other, and for how long it waits.

    Attributes:
        head: Largest size in bytes of a head.
        body: Largest size in bytes of a body. `Connection.receive` takes another limit for one frame.
        patience: Seconds for a head that has begun, and for each chunk (256 KiB) of a body, in both directions.
        rate: Messages per second that are received on average; each 4 KiB of a head count as one more. None: no limit.
        burst: Messages that may exceed `rate` at once.
    """

    head: int = 1 << 20
    body: int = 0
    patience: float = 30.0
    rate: float | None = None
    burst: int = 200


DEFAULT_LIMITS = Limits()
"""Default limits: heads of 1 MiB, no bodies, any rate."""


def encode(head: Head, body: int = 0) -> bytes:
    """Return the header and the head of a frame with a body of `body` bytes.

    Raises:
        ValueError: if `decode` would not accept `head`.
    """
    try:
        text = json.dumps(head, allow_nan=False, ensure_ascii=False).encode()
        _check(head)
    except (ProtocolError, RecursionError) as error:
        raise ValueError(f"the head cannot be sent: {error}") from error
    return HEADER.pack(_MAGIC, len(text), body) + text


def sizes(header: bytes, head: int, body: int) -> tuple[int, int]:
    """Return the sizes of head and body that `header` announces. Raises ProtocolError if one exceeds its limit."""
    magic, head_size, body_size = HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("the other side sent something that is not a frame")
    if head_size > head or body_size > body:
        raise ProtocolError(
            f"the other side announced a head of {head_size} bytes and a body of {body_size} (allowed: {head} and "
            f"{body})"
        )
    return head_size, body_size


def decode(text: bytes | bytearray) -> dict[str, Any]:
    """Return the head. Raises ProtocolError if it is malformed."""
    try:
        found = json.loads(
            text.decode(), parse_int=_integer, parse_float=_finite_number, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ProtocolError(f"the head is nested more deeply than {DEPTH} levels") from error
    except ValueError as error:
        raise ProtocolError(f"the head is not JSON: {error}") from error
    _check(found)
    if b"\\u" in text:
        # An escape is the only way to write a lone surrogate in valid UTF-8.
        _check_surrogates(found)
    return dict(found)


def _check(found: object) -> None:
    if not isinstance(found, Mapping) or not isinstance(found.get("kind"), str):
        raise ProtocolError("the head is not an object with a string `kind`")
    level: list[Any] = [found]
    for _ in range(DEPTH):
        level = [child for one in level for child in _children(one) if isinstance(child, Mapping | list | tuple)]
        if not level:
            return
    raise ProtocolError(f"the head is nested more deeply than {DEPTH} levels")


def _children(one: Any) -> Any:
    return one.values() if isinstance(one, Mapping) else one


def _check_surrogates(found: object) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ProtocolError("the head has a lone surrogate") from error


def _integer(text: str) -> int:
    # Long numbers are not converted, because that takes quadratic time or raises.
    if len(text) > _DIGITS or not -_LARGEST < (number := int(text)) < _LARGEST:
        raise ValueError(f"an integer of {len(text)} digits (allowed: below 2**63)")
    return number


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
