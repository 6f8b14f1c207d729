"""Hostile clients: connections and messages that no honest one makes, from fixed seeds.

Anyone can send `raw_bytes` and half a handshake. One who knows the secret can send `frames_of` a service: broken
frames, and whole ones whose head is random, of wrong types, huge, deeply nested, or was recorded from an honest client.
"""

import contextlib
import copy
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed_compress.transport.client import connect, parse_address
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.frames import HEADER, Limits

Message = Mapping[str, Any]
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 0.5, -0.0, 1 << 62, -(1 << 62), 10**400, 1e308, "", "x", "\ud800", "\x00", "9" * 5000,
    "../../etc/passwd", [], [[]], [None], {}, {"kind": "join"}, [1] * 1000, float("nan"), float("inf"),
)  # fmt: skip
"""Values in places where others belong."""


def raw_bytes(draw: random.Random) -> bytes:
    """What somebody sends who knows nothing: noise, other protocols, a hello that is cut off, forged or of old."""
    hello = struct.pack(
        "!8sH22s32s", b"DSCOMPR\n", draw.choice([0, 1, 1, 1, 2, 65535]), b"coordinator", draw.randbytes(32)
    )
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 300)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b'{"kind": "join"}\n' * 3,
            b"[" * 5000,
            hello[: draw.randrange(1, 64)],
            hello + draw.randbytes(32),
            hello + hello,
            b"",
        ]
    )


def frames_of(draw: random.Random, templates: Sequence[Message]) -> bytes:
    """A frame of one who knows the secret; `templates` are honest messages of the service."""
    return draw.choice(_FRAMES)(draw, templates)


def _frame(head: bytes, body: bytes = b"") -> bytes:
    return HEADER.pack(b"DSCF", len(head), len(body)) + head + body


def _noise(draw: random.Random, templates: Sequence[Message]) -> bytes:
    return draw.randbytes(draw.randrange(1, 200))


def _huge(draw: random.Random, templates: Sequence[Message]) -> bytes:
    return HEADER.pack(b"DSCF", draw.choice([0, 10, 2**32 - 1]), draw.choice([0, 2**40, 2**64 - 1])) + b"{}" * 5


def _truncated(draw: random.Random, templates: Sequence[Message]) -> bytes:
    whole = _frame(json.dumps(draw.choice(templates)).encode())
    return whole[: draw.randrange(1, len(whole))]


def _nested(draw: random.Random, templates: Sequence[Message]) -> bytes:
    levels = draw.choice([17, 900, 50_000])
    return _frame(draw.choice([b'{"kind":"join","a":' + b"[" * levels + b"]" * levels + b"}", b'{"kind":' * levels]))


def _not_a_head(draw: random.Random, templates: Sequence[Message]) -> bytes:
    heads = [b"", b"null", b"[]", b"{}", b'{"kind":1}', b'{"kind":"join"', b'{"kind":"\xff"}', b'{"kind":"\\udc00"}']
    numbers = [b'{"kind":"join","n":' + b"1" * 5000 + b"}", b'{"kind":"join","n":NaN}', draw.randbytes(50)]
    return _frame(draw.choice([*heads, *numbers]))


def _wrong_types(draw: random.Random, templates: Sequence[Message]) -> bytes:
    """An honest message with one or two odd fields, or without one."""
    found = copy.deepcopy(dict(draw.choice(templates)))
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice(list(found))
        if draw.random() < 0.2 and name != "kind":
            del found[name]
        elif isinstance(found[name], dict) and found[name] and draw.random() < 0.5:
            found[name][draw.choice(list(found[name]))] = copy.deepcopy(draw.choice(ODD))
        else:
            found[name] = copy.deepcopy(draw.choice(ODD))
    return _frame(json.dumps(found).encode())


def _unknown(draw: random.Random, templates: Sequence[Message]) -> bytes:
    kind = draw.choice(["", "status", "enter", "welcome", "over", "refused", "x" * 500, "__class__"])
    return _frame(json.dumps({**draw.choice(templates), "kind": kind}).encode())


def _replayed(draw: random.Random, templates: Sequence[Message]) -> bytes:
    return _frame(json.dumps(draw.choice(templates)).encode()) * draw.randrange(1, 5)


def _with_body(draw: random.Random, templates: Sequence[Message]) -> bytes:
    return _frame(json.dumps(draw.choice(templates)).encode(), draw.randbytes(100))


_FRAMES: Sequence[Callable[[random.Random, Sequence[Message]], bytes]] = (
    _noise, _huge, _truncated, _nested, _not_a_head, _wrong_types, _wrong_types, _wrong_types, _unknown, _replayed,
    _with_body,
)  # fmt: skip


def attack_unauthenticated(address: str, count: int, seed: int) -> int:
    """Send `count` openings to `address`, some of which stay open for a while. Return how many were taken."""
    draw, kept, taken = random.Random(seed), [], 0
    for _ in range(count):
        with contextlib.suppress(OSError):
            there = socket.create_connection(parse_address(address), timeout=5)
            kept.append(there)
            there.sendall(raw_bytes(draw))
            taken += 1
        if len(kept) > 40:
            kept.pop(draw.randrange(len(kept))).close()
    for there in kept:
        there.close()
    return taken


def attack_authenticated(
    address: str,
    service: str,
    credentials: Credentials,
    templates: Callable[[int], Sequence[Message]],
    count: int,
    seed: int,
) -> int:
    """Send `count` hostile frames, over as many connections as it takes, and read no answer. Return how many were sent.

    Args:
        templates: honest messages for the connection of that number, such as with a name of its own.
    """
    draw, sent, number = random.Random(seed), 0, 0
    while sent < count:
        number += 1
        with contextlib.suppress(OSError), _connected(address, service, credentials) as there:
            for message in _series(draw, templates(number), count - sent):
                sent += 1
                there.send_encoded(message)
    return sent


def _connected(address: str, service: str, credentials: Credentials) -> Connection:
    return connect(address, service, credentials, 5.0, Limits(patience=5.0))


def _series(draw: random.Random, templates: Sequence[Message], most: int) -> Iterator[bytes]:
    """Some honest messages, so that the service is in many states, and then hostile ones while it hears them."""
    for template in templates[: draw.randrange(len(templates))]:
        yield _frame(json.dumps(template).encode())
    for _ in range(min(most, draw.randrange(1, 20))):
        yield frames_of(draw, templates)


def flood(connection: Connection, frame: bytes, seconds: float) -> int:
    """Send `frame` as fast as the other side reads, and read nothing, for `seconds`. Return how many were sent."""
    end, sent = time.monotonic() + seconds, 0
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.send_encoded(frame)
            sent += 1
    return sent
