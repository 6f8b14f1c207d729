"""Frames: a fixed header with two sizes, a head (one JSON object with a `kind`), and a body of plain bytes.

The sizes are checked against limits before memory is allocated. `messages` checks what a head contains.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from deepspeed_compress.transport.errors import ProtocolError

Head = Mapping[str, Any]
HEADER = struct.Struct("!4sIQ")
"""Magic bytes, size of the head, size of the body."""
_MAGIC = b"DSCF"


def encode(head: Head, body: int = 0) -> bytes:
    """Return the header and the head of a frame with a body of `body` bytes.

    Raises:
        ValueError: if `head` cannot be represented in JSON.
    """
    text = json.dumps(head, allow_nan=False, ensure_ascii=False).encode()
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
    """Return the head. Raises ProtocolError if it is not a JSON object with a string `kind`.

    The parser refuses NaN, infinity, invalid UTF-8, lone surrogates, integers of thousands of digits, and deep nesting.
    """
    try:
        head = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ProtocolError(f"the head is not JSON: {error}") from error
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise ProtocolError("the head is not an object with a string `kind`")
    return head
