"""Heads of frames: valid and malformed ones, and limits of their sizes."""

import random
import string

import pytest

from deepspeed_compress.transport.connection import HEADER, decode, encode, sizes
from deepspeed_compress.transport.errors import ProtocolError


def nested(levels: int) -> bytes:
    return b'{"kind":"x","a":' + b"[" * levels + b"]" * levels + b"}"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'"kind"',
        b"{}",
        b'{"kind": 1}',
        b'{"kind": null}',
        b'{"kind": "x", "a": NaN}',
        b'{"kind": "x", "a": Infinity}',
        b'{"kind": "x", "a": -Infinity}',
        b'{"kind": "x", "a": ' + b"1" * 100_000 + b"}",
        b'{"kind": "x\\ud800"}',
        b'{"kind": "x", "\\udfff": 1}',
        b'{"kind": "x", "a": ["\\ud83d"]}',
        b'{"kind": "x", "a": "\xff"}',
        b'{"kind": "x", "a": "\xed\xa0\x80"}',
        b'{"kind": "x"} {"kind": "x"}',
        b'{"kind": "x"',
        nested(900),
        nested(100_000),
        b'{"kind":' * 50_000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_malformed_head_raises_a_protocol_error(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(text)


def test_a_decoded_head_equals_the_encoded_one() -> None:
    head = {"kind": "x", "a": [1, -2.5, None, True, "ü \\ud800 \U0001f600"], "b": {"c": {}}, "n": (1 << 63) - 1}
    text = encode(head, 7)
    assert sizes(text[: HEADER.size], 1000, 7) == (len(text) - HEADER.size, 7)
    assert decode(text[HEADER.size :]) == head
    assert decode(b'{"kind": "\\ud83d\\ude00"}') == {"kind": "\U0001f600"}


@pytest.mark.parametrize("value", [float("nan"), "\ud800", float("inf")])
def test_a_head_that_the_receiver_would_refuse_is_not_sent(value: object) -> None:
    with pytest.raises(ValueError, match=r"Out of range|surrogates not allowed"):
        encode({"kind": "x", "a": value})


@pytest.mark.parametrize(("head", "body"), [(11, 0), (10, 21), (2**32 - 1, 0), (0, 2**64 - 1)])
def test_sizes_above_the_limits_are_refused(head: int, body: int) -> None:
    with pytest.raises(ProtocolError, match="allowed: 10 and 20"):
        sizes(HEADER.pack(b"DSCF", head, body), 10, 20)


def test_random_bytes_raise_only_protocol_errors() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices('{}[]":,\\u0d8kind1eE+-.' + string.ascii_letters, k=draw.randrange(60)))
        for raw in (text.encode(), b'{"kind":"x","a":' + text.encode() + b"}", draw.randbytes(20)):
            try:
                assert isinstance(decode(raw)["kind"], str)
            except ProtocolError:
                continue
