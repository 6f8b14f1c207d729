"""Format of the log: a JSON object on a line, followed by as many bytes as it announces."""

import json
from io import BufferedIOBase
from typing import Any, BinaryIO

from deepspeed_compress.transport.connection import Buffer
from deepspeed_compress.transport.frames import Head

_LINE = 1 << 28
"""Largest size in bytes of a line, which holds the heads of all ranks of an island."""
_PIECE = 1 << 16
"""Bytes that are read at once."""


def write_entry(stream: BinaryIO | BufferedIOBase, head: Head, body: Buffer = b"") -> None:
    """Write `head` and `body`.

    Raises:
        ValueError: before anything is written, if `head` is too long to be read again.
    """
    size = {"bytes": len(body)} if len(body) else {}
    line = json.dumps({**head, **size}).encode() + b"\n"
    if len(line) > _LINE:
        raise ValueError(f"the heads of a call have {len(line)} bytes (allowed: {_LINE})")
    stream.write(line)
    stream.write(body)


def read_entry(stream: BinaryIO | BufferedIOBase) -> tuple[dict[str, Any], bytearray] | None:
    """Return the next head and body; None at the end.

    Raises:
        EOFError: if the entry is truncated.
        ValueError: if it is damaged.
        RecursionError: if it is nested too deeply.
    """
    line = stream.readline(_LINE)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise EOFError("a head is cut off")
    head = json.loads(line)
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise ValueError(f"not a head: {line[:80]!r}")
    size = head.pop("bytes", 0)
    if type(size) is not int or size < 0:
        raise ValueError(f"not a number of bytes: {line[:80]!r}")
    body = bytearray()
    # Memory grows with the bytes that are present, not with those that are announced.
    while len(body) < size:
        piece = stream.read(min(_PIECE, size - len(body)))
        if not piece:
            raise EOFError("a body is cut off")
        body += piece
    return head, body
