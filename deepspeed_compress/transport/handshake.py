"""Mutual proof that both sides know the secret, without sending it: HMAC-SHA256 over nonces of both sides.

    client -> server  hello   magic, version, service, nonce            64 bytes
    server -> client  hello   magic, version, no service, nonce         64 bytes
    client -> server  proof   HMAC of "client" and both hellos          32 bytes
    server -> client  verdict code, service, HMAC of "server", both hellos, code and service

A proof cannot be replayed, because the other side's nonce is fresh, nor reflected, because it names its role. The steps
are generators without sockets: each yields what to send and how many bytes it wants next. `follow` takes them over a
channel.
"""

import contextlib
import hmac
import os
import struct
from collections.abc import Callable, Generator

from deepspeed_compress.transport.channel import Channel
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError, ProtocolError, ServerBusyError

VERSION = 1
"""Version of the transport. Both sides must have the same one."""
_MAGIC = b"DSCOMPR\n"
_NAME = 22
"""Largest size in bytes of the name of a service."""
_NONCE = _PROOF = 32
HELLO = struct.Struct(f"!8sH{_NAME}s{_NONCE}s")
_VERDICT = struct.Struct(f"!B{_NAME}s{_PROOF}s")
_WELCOME, _WRONG_SECRET, _OTHER_SERVICE, _BUSY = range(4)


Steps = Generator[tuple[bytes, int], bytes, None]
"""Steps, each with the bytes to send and the number of bytes to receive after that (0: none, it is the last one)."""


def client_steps(key: bytes, service: str) -> Steps:
    """Prove to a server of `service` that this side knows `key`, and check that the server knows it.

    Raises:
        AuthenticationError: if one side does not accept the other's proof.
        OtherServiceError: if the server runs another service.
        ServerBusyError: if the server has no room for another connection.
        ProtocolError: if the server is a different program, or uses another version.
    """
    ours = HELLO.pack(_MAGIC, VERSION, _packed(service), os.urandom(_NONCE))
    theirs = yield ours, HELLO.size
    _check_version(theirs)
    if theirs == ours:
        raise AuthenticationError("the server only repeats the client's messages")
    verdict = yield _client_proof(key, ours + theirs), _VERDICT.size
    code, found, proof = _VERDICT.unpack(verdict)
    if code == _WRONG_SECRET:
        raise AuthenticationError("the server has a different secret")
    if not hmac.compare_digest(proof, _server_proof(key, ours + theirs, verdict[: -len(proof)])):
        raise AuthenticationError("the server does not know the secret")
    if code == _OTHER_SERVICE:
        raise OtherServiceError(_unpacked(found), service)
    if code == _BUSY:
        raise ServerBusyError("the server has reached its maximum number of connections")
    if code != _WELCOME:
        raise ProtocolError(f"the server answered with the unknown code {code}")


def server_steps(key: bytes, service: str, has_room: Callable[[], bool]) -> Steps:
    """Check that a client knows `key`, and prove that this side does. Raises as `client_steps` does."""
    theirs = yield b"", HELLO.size
    wanted = _service_of(theirs)
    ours = HELLO.pack(_MAGIC, VERSION, b"", os.urandom(_NONCE))
    # The client then learns this side's version before the connection ends.
    proof = yield ours, _PROOF
    _check_version(theirs)
    if not hmac.compare_digest(proof, _client_proof(key, theirs + ours)):
        yield _VERDICT.pack(_WRONG_SECRET, b"", bytes(_PROOF)), 0
        raise AuthenticationError("the client has a different secret")
    code = _OTHER_SERVICE if wanted != _packed(service) else _WELCOME if has_room() else _BUSY
    about = struct.pack(f"!B{_NAME}s", code, _packed(service))
    yield about + _server_proof(key, theirs + ours, about), 0
    if code == _OTHER_SERVICE:
        raise OtherServiceError(service, _unpacked(wanted))
    if code == _BUSY:
        raise ServerBusyError("this server has reached its maximum number of connections")


def follow(steps: Steps, channel: Channel, deadline: float) -> None:
    """Take the steps of one side. Raises as they do, or an OSError if the other side is gone or too slow."""
    out, wanted = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            channel.write(memoryview(out), deadline)
            received = bytearray(wanted)
            channel.read_all(memoryview(received), deadline)
            out, wanted = steps.send(bytes(received))


def _packed(service: str) -> bytes:
    name = service.encode()
    if not 0 < len(name) <= _NAME:
        raise ValueError(f"service {service!r} has {len(name)} bytes (allowed: 1 to {_NAME})")
    return name.ljust(_NAME, b"\0")


def _unpacked(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _service_of(hello: bytes) -> bytes:
    """Return the packed name of the service in `hello`."""
    magic, _, service, _ = HELLO.unpack(hello)
    if magic != _MAGIC:
        raise ProtocolError(
            "the other side does not speak this protocol; it is a different program, or only one side uses TLS"
        )
    return bytes(service)


def _check_version(hello: bytes) -> None:
    _service_of(hello)
    version = HELLO.unpack(hello)[1]
    if version != VERSION:
        raise ProtocolError(
            f"the other side uses version {version} of the transport, and this side version {VERSION}; install the "
            "same release of deepspeed_compress on both"
        )


def _client_proof(key: bytes, hellos: bytes) -> bytes:
    return hmac.digest(key, b"deepspeed_compress client " + hellos, "sha256")


def _server_proof(key: bytes, hellos: bytes, about: bytes) -> bytes:
    return hmac.digest(key, b"deepspeed_compress server " + hellos + about, "sha256")
