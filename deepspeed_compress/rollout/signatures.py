"""Signatures of HTTP requests to a store, and of its answers, by HMAC-SHA256 with the shared secret.

A signature covers everything that a request asks for: the method, the name, the SHA-256 of the body, the client's time,
and a random number that the server accepts once. The signature of an answer covers the random number, the status, and
the SHA-256 of the body, so an answer belongs to one request. The secret itself is never sent.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 300
"""Seconds by which the time of a request may differ from the server's clock."""
SIGNATURE = "x-store-signature"
"""Header with the signature of a request or of an answer."""
_TIME, _NONCE, _BODY = "x-store-time", "x-store-nonce", "x-store-body"
_MINUTE = 60
"""Seconds of requests whose numbers are forgotten together."""
_VALUES = re.compile(r"(\d{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64})")


@dataclass(frozen=True)
class Stamp:
    """Content of a request that its signature covers.

    Attributes:
        method: method of HTTP.
        name: name of the blob; "" for the list of names.
        time: time of the client, in seconds since 1970.
        nonce: random number in hexadecimal digits.
        digest: SHA-256 of the body.
    """

    method: str
    name: str
    time: int
    nonce: str
    digest: str

    @classmethod
    def new(cls, method: str, name: str, body: bytes) -> "Stamp":
        """Return the stamp of a new request."""
        return cls(method, name, int(time.time()), secrets.token_hex(16), hashlib.sha256(body).hexdigest())

    @classmethod
    def read(cls, method: str, name: str, headers: Mapping[str, str]) -> "Stamp | None":
        """Return the stamp of a request that has arrived; None if a header is missing or malformed."""
        found = _VALUES.fullmatch(" ".join(headers.get(header, "") for header in (_TIME, _NONCE, _BODY)))
        return None if found is None else cls(method, name, int(found[1]), found[2], found[3])

    def headers(self, key: bytes) -> dict[str, str]:
        """Return the headers of the request."""
        return {_TIME: str(self.time), _NONCE: self.nonce, _BODY: self.digest, SIGNATURE: self._sign(key)}

    def has_signature(self, key: bytes, signature: str) -> bool:
        """Return True if `signature` proves that the client knows the secret. Takes constant time."""
        return hmac.compare_digest(self._sign(key).encode(), signature.encode())

    def sign_answer(self, key: bytes, status: int, digest: str) -> str:
        """Return the signature of the answer to this request, whose body has the SHA-256 `digest`."""
        return _hmac(key, "answer", self.nonce, str(status), digest)

    def _sign(self, key: bytes) -> str:
        return _hmac(key, "request", self.method, self.name, str(self.time), self.nonce, self.digest)


def _hmac(key: bytes, *fields: str) -> str:
    return hmac.digest(key, "\n".join(("deepspeed_compress rollout store", *fields)).encode(), "sha256").hex()


class SeenNonces:
    """Random numbers of accepted requests, so that a recorded one is not carried out again.

    Numbers are kept in sets by the minute of their request, for as long as its time may be accepted: 70 bytes each.
    """

    def __init__(self) -> None:
        self._of_minute: dict[int, set[int]] = {}

    def add(self, stamp: Stamp) -> bool:
        """Note the number of a request. Return False if it was there before."""
        oldest = (time.time() - WINDOW) // _MINUTE
        for minute in [minute for minute in self._of_minute if minute < oldest]:
            del self._of_minute[minute]
        seen, number = self._of_minute.setdefault(stamp.time // _MINUTE, set()), int(stamp.nonce[:16], 16)
        if number in seen:
            return False
        seen.add(number)
        return True
