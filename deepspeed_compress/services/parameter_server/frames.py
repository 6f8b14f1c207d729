"""What islands and a parameter server say to each other: a JSON object on a line, and the bytes that it announces.

An island says `enter` (a new one), `resume` (one of a checkpoint), `leave`; and, a part for every rank, `fresh` (the
anchor as it is), `seed` (weights that nobody has trained yet) and `push`. The server answers `welcome`, `left`,
`resumed`, `newest`, `untrained`, `found` (there is no anchor), `exact`, `taken`, `dropped` and `refused`. A call is
numbered by its island, so it may be said twice.
"""

import json
from collections.abc import Mapping
from io import BufferedIOBase
from typing import Any, BinaryIO

__all__ = ["PIECE", "Buffer", "Head", "receive", "send"]

Head = Mapping[str, Any]
"""`kind`, and what belongs to it; `bytes`, where some follow."""
Buffer = bytes | bytearray | memoryview
HEAD = 1 << 28
"""Bytes of a line: in the log it has the heads of all ranks of an island."""
PIECE = 1 << 16
"""Bytes that are written at once: a timeout is one of a piece."""


def send(stream: BinaryIO | BufferedIOBase, head: Head, body: Buffer = b"") -> None:
    """Write `head` and `body`. OSError where nobody is there."""
    size = {"bytes": len(body)} if len(body) else {}
    stream.write(json.dumps({**head, **size}).encode() + b"\n")
    view = memoryview(body)
    for start in range(0, len(view), PIECE):
        stream.write(view[start : start + PIECE])
    stream.flush()


def receive(stream: BinaryIO | BufferedIOBase) -> tuple[dict[str, Any], bytearray] | None:
    """The next head and body; None at the end. ValueError where it is none, EOFError where it is cut off."""
    line = stream.readline(HEAD)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise EOFError("a head is cut off")
    head = json.loads(line)
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise ValueError(f"no head: {line[:80]!r}")
    size = head.pop("bytes", 0)
    if type(size) is not int or size < 0:
        raise ValueError(f"no number of bytes: {size!r}")
    body = bytearray()
    # No room for what is announced alone.
    while len(body) < size:
        piece = stream.read(min(PIECE, size - len(body)))
        if not piece:
            raise EOFError("a body is cut off")
        body += piece
    return head, body
