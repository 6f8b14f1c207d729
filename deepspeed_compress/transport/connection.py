"""Authenticated connection, as both sides use it: frames in, frames out, with limits and deadlines.

A frame is a fixed header with two sizes, a head (one JSON object with a `kind`), and a body of plain bytes. The sizes
are checked against limits before memory is allocated. `messages` checks what a head contains.
"""

import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from deepspeed_compress.transport.channel import Channel
from deepspeed_compress.transport.errors import ConnectionClosedError, ProtocolError

Head = Mapping[str, Any]
HEADER = struct.Struct("!4sIQ")
"""Magic bytes, size of the head, size of the body."""
_MAGIC = b"DSCF"
Buffer = bytes | bytearray | memoryview
CHUNK = 1 << 18
"""Bytes of a body that are read or written under one deadline."""


@dataclass(frozen=True)
class Limits:
    """Limits of what one side accepts from the other, and for how long it waits.

    Attributes:
        head: Largest size in bytes of a head.
        body: Largest size in bytes of a body. `Connection.receive` takes another limit for one frame.
        patience: Seconds for a head that has begun, and for each chunk (256 KiB) of a body, in both directions.
    """

    head: int = 1 << 20
    body: int = 0
    patience: float = 30.0


DEFAULT_LIMITS = Limits()
"""Heads of 1 MiB, and no bodies."""
LARGE_HEAD = 1 << 24
"""Largest size in bytes of a message with the addresses of thousands of ranks, or with all parameters of a model."""


class Connection(AbstractContextManager["Connection"]):
    """Connection that sends and receives frames. One thread may receive while others send.

    Every method raises an OSError if the connection is lost, too slow or violates the protocol; it cannot be used any
    more then. No method waits for the other side longer than `limits.patience`, except `receive` for a new frame.

    Args:
        channel: the connected socket.
        limits: limits of what the other side may send.
        peer: address of the other side, for messages.
    """

    def __init__(self, channel: Channel, limits: Limits, peer: str = "") -> None:
        self.peer, self.limits = peer, limits
        self.left = 0
        """Unread bytes of the body of the last frame."""
        self._channel = channel
        self._sending = threading.Lock()

    @property
    def own_address(self) -> str:
        """Return the IP address of this side."""
        return str(self._channel.socket.getsockname()[0])

    def send(self, head: Head, body: Buffer = b"") -> None:
        """Send a frame. Raises ValueError, before anything is sent, if `head` is not a valid head."""
        view = memoryview(body).cast("B")
        self.send_pieces(head, len(view), (view,))

    def send_pieces(self, head: Head, size: int, pieces: Iterable[Buffer]) -> None:
        """Send a frame whose body of `size` bytes is produced while it is sent.

        Raises:
            ValueError: if `pieces` do not have `size` bytes in total.
        """
        begun = encode(head, size)
        with self._sending, self._ending_on_error():
            self._write(memoryview(begun))
            for piece in pieces:
                view = memoryview(piece).cast("B")
                size -= len(view)
                if size < 0:
                    break
                for start in range(0, len(view), CHUNK):
                    self._write(view[start : start + CHUNK])
            if size:
                raise ValueError("the pieces do not add up to the announced size of the body")

    def send_encoded(self, frame: bytes) -> None:
        """Send a complete frame that `encode` made."""
        with self._sending, self._ending_on_error():
            self._write(memoryview(frame))

    def receive(self, timeout: float | None = None, body: int | None = None) -> dict[str, Any] | None:
        """Return the head of the next frame; None if none begins for `timeout` seconds.

        The unread rest of the last frame's body is dropped. The size of the new body is in `left`; read it with
        `read_body`, `read_into` or `pieces`.

        Args:
            timeout: seconds; None waits forever. A frame that has begun must be complete within `limits.patience`.
            body: largest size in bytes of the body, in place of `limits.body`.
        """
        with self._ending_on_error():
            for _ in self.pieces():
                pass
            header = memoryview(bytearray(HEADER.size))
            try:
                begun = self._channel.read_some(header, None if timeout is None else time.monotonic() + timeout)
            except TimeoutError:
                return None
            if not begun:
                raise ConnectionClosedError("the other side has closed the connection")
            return self._rest_of_head(header, begun, body)

    def arrived(self, wait: float) -> list[dict[str, Any]]:
        """Return the heads of all frames that have arrived, waiting at most `wait` seconds for the first one."""
        found: list[dict[str, Any]] = []
        while (head := self.receive(0.0 if found else wait)) is not None:
            found.append(head)
        return found

    def read_body(self) -> bytearray:
        """Return the rest of the body. Its memory grows with the received bytes, not with the announced ones."""
        found = bytearray()
        for piece in self.pieces():
            found += piece
        return found

    def read_into(self, memory: Buffer) -> None:
        """Fill `memory` with the next bytes of the body. Raises ProtocolError if there are fewer."""
        view = memoryview(memory).cast("B")
        with self._ending_on_error():
            if len(view) > self.left:
                raise ProtocolError(f"the body has {self.left} bytes left (expected: {len(view)})")
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                self._channel.read_all(chunk, time.monotonic() + self.limits.patience)
                self.left -= len(chunk)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the rest of the body in chunks of at most `CHUNK` bytes. The memory of a chunk is reused."""
        memory = memoryview(bytearray(min(self.left, CHUNK)))
        while self.left:
            piece = memory[: self.left]
            self.read_into(piece)
            yield piece

    def has_hung_up(self) -> bool:
        """Return True if either side has closed the connection. Does not read."""
        return self._channel.has_hung_up()

    def end(self) -> None:
        """End the connection from any thread: a thread that waits for the other side gets an OSError at once."""
        self._channel.end()

    def close(self) -> None:
        """End the connection and free its descriptor. For the thread that owns it."""
        self._channel.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End the channel if the block fails, because the next byte would be misinterpreted."""
        try:
            yield
        except BaseException:
            self._channel.end()
            raise

    def _rest_of_head(self, header: memoryview, begun: int, body: int | None) -> dict[str, Any]:
        deadline = time.monotonic() + self.limits.patience
        self._channel.read_all(header[begun:], deadline)
        most = self.limits.body if body is None else body
        head_size, body_size = sizes(header.tobytes(), self.limits.head, most)
        head = bytearray()
        while len(head) < head_size:
            chunk = memoryview(bytearray(min(head_size - len(head), CHUNK)))
            self._channel.read_all(chunk, deadline)
            head += chunk
        found, self.left = decode(head), body_size
        return found

    def _write(self, view: memoryview) -> None:
        self._channel.write(view, time.monotonic() + self.limits.patience)


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
