"""Both sides prove that they know the secret. A proof cannot be replayed or reflected."""

import pytest

from deepspeed_compress.transport import handshake
from deepspeed_compress.transport.errors import (
    AuthenticationError,
    OtherServiceError,
    ProtocolError,
    ServerBusyError,
)
from deepspeed_compress.transport.handshake import Steps, client_steps, server_steps

KEY = b"0123456789abcdef"


class Handshake:
    """A handshake between both sides, with the bytes that they sent and their errors."""

    def __init__(self, client: Steps, server: Steps) -> None:
        self.sent: list[bytes] = []
        self.errors: dict[str, Exception] = {}
        next(server)
        data, server_is_next = next(client)[0], True
        while data:
            self.sent.append(data)
            data = self._send("server" if server_is_next else "client", server if server_is_next else client, data)
            server_is_next = not server_is_next
        self._finish("server", server)

    def _send(self, name: str, steps: Steps, data: bytes) -> bytes:
        try:
            return steps.send(data)[0]
        except StopIteration:
            return b""
        except OSError as error:
            self.errors[name] = error
            return b""

    def _finish(self, name: str, steps: Steps) -> None:
        try:
            next(steps, None)
        except OSError as error:
            self.errors[name] = error


def test_sides_with_the_same_secret_accept_each_other() -> None:
    result = Handshake(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    assert result.errors == {}
    assert [len(one) for one in result.sent] == [64, 64, 32, 55]
    assert not any(KEY in one for one in result.sent)


def test_different_secrets_are_refused_on_both_sides() -> None:
    result = Handshake(client_steps(b"another secret!!", "echo"), server_steps(KEY, "echo", lambda: True))
    assert isinstance(result.errors["client"], AuthenticationError)
    assert isinstance(result.errors["server"], AuthenticationError)
    assert result.sent[-1] == b"\x01" + bytes(54), "the client learns nothing about the server"


def test_a_replayed_proof_is_refused() -> None:
    result = Handshake(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    server = server_steps(KEY, "echo", lambda: True)
    next(server)
    server.send(result.sent[0])
    assert server.send(result.sent[2])[0][0] == 1
    with pytest.raises(AuthenticationError):
        next(server)


def test_a_replayed_server_verdict_is_refused() -> None:
    result = Handshake(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    client = client_steps(KEY, "echo")
    next(client)
    client.send(result.sent[1])
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        client.send(result.sent[3])


def test_a_server_that_reflects_messages_is_refused() -> None:
    client = client_steps(KEY, "echo")
    with pytest.raises(AuthenticationError, match="repeats"):
        client.send(next(client)[0])
    client = client_steps(KEY, "echo")
    next(client)
    other = handshake.HELLO.pack(b"DSCOMPR\n", 1, b"", bytes(32))
    proof = client.send(other)[0]
    with pytest.raises(AuthenticationError):
        client.send(b"\0" + b"echo".ljust(22, b"\0") + proof)


def test_a_modified_verdict_is_refused() -> None:
    """An attacker in the middle cannot claim that the server is busy or runs another service."""
    for code in (2, 3):
        client, server = client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)
        next(server)
        verdict = server.send(client.send(server.send(next(client)[0])[0])[0])[0]
        with pytest.raises(AuthenticationError):
            client.send(bytes([code]) + verdict[1:])


def test_the_service_is_named_to_clients_that_know_the_secret() -> None:
    result = Handshake(client_steps(KEY, "coordinator"), server_steps(KEY, "parameter server", lambda: True))
    error = result.errors["client"]
    assert isinstance(error, OtherServiceError)
    assert error.service == "parameter server"
    assert str(error) == "the server is a parameter server, not a coordinator"


def test_both_versions_are_named_if_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)
    next(server)
    hello = bytearray(next(client)[0])
    hello[9] = 2
    answer = server.send(bytes(hello))[0]
    with pytest.raises(ProtocolError, match="version 2 of the transport, and this side version 1"):
        server.send(bytes(32))
    monkeypatch.setattr(handshake, "VERSION", 2)
    client = client_steps(KEY, "echo")
    next(client)
    with pytest.raises(ProtocolError, match="version 1 of the transport, and this side version 2"):
        client.send(answer)


def test_another_protocol_is_named() -> None:
    server = server_steps(KEY, "echo", lambda: True)
    next(server)
    with pytest.raises(ProtocolError, match="it is a different program"):
        server.send(b"GET / HTTP/1.1\r\n".ljust(64))


def test_every_handshake_differs() -> None:
    sent = [Handshake(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)).sent for _ in range(2)]
    assert all(first != second for first, second in zip(*sent, strict=True))


def test_a_full_server_raises_server_busy() -> None:
    result = Handshake(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: False))
    assert {name: type(one) for name, one in result.errors.items()} == dict.fromkeys(
        ("client", "server"), ServerBusyError
    )
