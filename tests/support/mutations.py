"""Random damage of bytes and of JSON documents, for tests of everything that others may have written or sent."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**53 + 1, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, -1e300),
    *(float("nan"), float("inf"), "", "1", "x", "9" * 5000, "\x1b[31mred\x07", "\ud800", "\x00", "../../etc/passwd"),
    *([], [1], [[]], [None], [1] * 1000, ["", 0, 2**60], [["p", -4, 12]], {}, {"a": 1}, {"kind": "join"}),
)
"""Values that replace those of a document."""
NAMES = ("step", "kind", "version", "files", "x", "")
"""Names of added values, most of which some documents have."""
PIECES = (b"9" * 5000, b"\x00", b"\xff\xfe", b"\xdc\x9b", b'"\\ud800"', b"NaN", b"1e999", b"null", b"{}", b'"', b",")
"""Bytes that replace a part of a file."""
OPENINGS = (b"[", b"{", b'{"a":', b"(")
"""Bytes that nest what follows."""


def any_value(rng: random.Random) -> Any:
    """Return a copy of one of `VALUES`."""
    return copy.deepcopy(rng.choice(VALUES))


def change(document: Any, rng: random.Random) -> None:
    """Replace or repeat a value anywhere in `document`, remove it, or add one, in place. An empty document stays."""
    if not (places := _places(document)):
        return
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(NAMES)] = any_value(rng)
        case 2:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((2, 100)))]
        case _:
            holder[key] = any_value(rng)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) for every value in a document."""
    kinds = {dict: lambda: [*document.items()], list: lambda: [*enumerate(document)]}
    items = kinds.get(type(document), list)()
    return [place for key, child in items for place in ((document, key), *_places(child))]


def damage(content: bytes, rng: random.Random, pieces: Sequence[bytes] = PIECES) -> bytes:
    """Return `content` with flipped bits, or with a part removed, repeated, nested or replaced by one of `pieces`."""
    begin, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    match rng.randrange(7):
        case 0:
            return content[:begin]
        case 1:
            return content[:begin] + content[end:]
        case 2:
            return content[:end] + content[begin:]
        case 3:
            return content[:begin] + rng.choice(OPENINGS) * rng.choice((3, 50_000)) + content[begin:]
        case 4:
            return content[:begin] + rng.choice(pieces) + content[rng.choice((begin, begin + 1, begin + 8, end)) :]
        case _:
            return _flipped(content, rng)


def _flipped(content: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 1, 8)) if content else 0):
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def damaged_document(
    content: bytes, rng: random.Random, sign: Callable[[Any], Any] = lambda document: document
) -> bytes:
    """Return a JSON document with one to three changes, `sign`ed again, or with damaged bytes, equally often."""
    if rng.random() < 0.5:
        return damage(content, rng)
    document = json.loads(content)
    for _ in range(rng.choice((1, 1, 3))):
        change(document, rng)
    return json.dumps(sign(document)).encode()


def damaged_line(content: bytes, rng: random.Random) -> bytes:
    """Return lines of JSON of which one is a `damaged_document`."""
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    lines[number] = damaged_document(lines[number], rng)
    return b"\n".join(lines) + b"\n" * rng.randrange(2)
