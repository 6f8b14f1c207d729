"""Hostile clients with fixed seeds.

Anyone can send `raw_bytes` and parts of a handshake. A client that knows the secret can send `frames_of` a service:
broken frames, and complete ones whose head is random, has wrong types, is huge or deeply nested, or was recorded from
an honest client.
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

import pytest

from deepspeed_compress.transport.client import connect, parse_address
from deepspeed_compress.transport.connection import HEADER, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from tests.support.mutations import change

Message = Mapping[str, Any]
SERVICES = ("transport", "local_sgd", "checkpointing", "rollout", "launcher", "agents")
FLOODED = pytest.mark.slow
"""Mark of tests that send for seconds. CI runs them if a service has changed."""
COUNTS = pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=FLOODED)])
"""Number of hostile messages that a service is sent."""


def raw_bytes(rng: random.Random) -> bytes:
    """Return bytes of a client without the secret: noise, other protocols, or a truncated, forged or outdated hello."""
    hello = struct.pack(
        "!8sH22s32s", b"DSCOMPR\n", rng.choice([0, 1, 1, 1, 2, 65535]), b"coordinator", rng.randbytes(32)
    )
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 300)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b'{"kind": "join"}\n' * 3,
            b"[" * 5000,
            hello[: rng.randrange(1, 64)],
            hello + rng.randbytes(32),
            hello + hello,
            b"",
        ]
    )


def frames_of(rng: random.Random, templates: Sequence[Message]) -> bytes:
    """Return a frame of a client that knows the secret. `templates` are honest messages of the service."""
    return rng.choice(_FRAMES)(rng, templates)


def _frame(head: bytes, body: bytes = b"") -> bytes:
    return HEADER.pack(b"DSCF", len(head), len(body)) + head + body


def _noise(rng: random.Random, templates: Sequence[Message]) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


def _huge(rng: random.Random, templates: Sequence[Message]) -> bytes:
    return HEADER.pack(b"DSCF", rng.choice([0, 10, 2**32 - 1]), rng.choice([0, 2**40, 2**64 - 1])) + b"{}" * 5


def _truncated(rng: random.Random, templates: Sequence[Message]) -> bytes:
    whole = _frame(json.dumps(rng.choice(templates)).encode())
    return whole[: rng.randrange(1, len(whole))]


def _nested(rng: random.Random, templates: Sequence[Message]) -> bytes:
    levels = rng.choice([17, 900, 50_000])
    return _frame(rng.choice([b'{"kind":"join","a":' + b"[" * levels + b"]" * levels + b"}", b'{"kind":' * levels]))


def _not_a_head(rng: random.Random, templates: Sequence[Message]) -> bytes:
    heads = [b"", b"null", b"[]", b"{}", b'{"kind":1}', b'{"kind":"join"', b'{"kind":"\xff"}', b'{"kind":"\\udc00"}']
    numbers = [b'{"kind":"join","n":' + b"1" * 5000 + b"}", b'{"kind":"join","n":NaN}', rng.randbytes(50)]
    return _frame(rng.choice([*heads, *numbers]))


def _wrong_types(rng: random.Random, templates: Sequence[Message]) -> bytes:
    """Return an honest message with one or two changes."""
    message = copy.deepcopy(dict(rng.choice(templates)))
    for _ in range(rng.randrange(1, 3)):
        change(message, rng)
    return _frame(json.dumps(message).encode())


def _unknown(rng: random.Random, templates: Sequence[Message]) -> bytes:
    kind = rng.choice(["", "status", "enter", "welcome", "over", "refused", "x" * 500, "__class__"])
    return _frame(json.dumps({**rng.choice(templates), "kind": kind}).encode())


def _replayed(rng: random.Random, templates: Sequence[Message]) -> bytes:
    return _frame(json.dumps(rng.choice(templates)).encode()) * rng.randrange(1, 5)


def _with_body(rng: random.Random, templates: Sequence[Message]) -> bytes:
    return _frame(json.dumps(rng.choice(templates)).encode(), rng.randbytes(100))


_FRAMES: Sequence[Callable[[random.Random, Sequence[Message]], bytes]] = (
    _noise, _huge, _truncated, _nested, _not_a_head, _wrong_types, _wrong_types, _wrong_types, _unknown, _replayed,
    _with_body,
)  # fmt: skip


def attack_unauthenticated(address: str, count: int, seed: int) -> int:
    """Open `count` connections to `address`, some of which stay open for a while. Return how many were accepted."""
    rng, open_, accepted = random.Random(seed), [], 0
    for _ in range(count):
        with contextlib.suppress(OSError):
            there = socket.create_connection(parse_address(address), timeout=5)
            open_.append(there)
            there.sendall(raw_bytes(rng))
            accepted += 1
        if len(open_) > 40:
            open_.pop(rng.randrange(len(open_))).close()
    for there in open_:
        there.close()
    return accepted


def attack_authenticated(
    address: str,
    service: str,
    credentials: Credentials,
    templates: Callable[[int], Sequence[Message]],
    count: int,
    seed: int,
) -> int:
    """Send `count` hostile frames over several connections, without reading answers. Return how many were sent.

    Args:
        address: address of the server.
        service: name of the service.
        credentials: used to prove knowledge of the secret.
        templates: function of the number of a connection that returns honest messages for it.
        count: number of frames.
        seed: seed of the random numbers.
    """
    rng, sent, number = random.Random(seed), 0, 0
    while sent < count:
        number += 1
        with contextlib.suppress(OSError), _connected(address, service, credentials) as there:
            for message in _series(rng, templates(number), count - sent):
                sent += 1
                there.send_encoded(message)
    return sent


def _connected(address: str, service: str, credentials: Credentials) -> Connection:
    return connect(address, service, credentials, 5.0, Limits(patience=5.0))


def _series(rng: random.Random, templates: Sequence[Message], most: int) -> Iterator[bytes]:
    """Yield some honest messages, so that the service reaches many states, followed by hostile ones."""
    for template in templates[: rng.randrange(len(templates))]:
        yield _frame(json.dumps(template).encode())
    for _ in range(min(most, rng.randrange(1, 20))):
        yield frames_of(rng, templates)


def flood(connection: Connection, frame: bytes, seconds: float) -> int:
    """Send `frame` for `seconds` as fast as possible, without reading answers. Return how many were sent."""
    end, sent = time.monotonic() + seconds, 0
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.send_encoded(frame)
            sent += 1
    return sent
