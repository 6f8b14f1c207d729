"""Both sides prove that they know the secret; a proof that was seen before, or comes back, is of no use."""

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


class Recorded:
    """Runs both sides against each other, and keeps what each has sent."""

    def __init__(self, client: Steps, server: Steps) -> None:
        self.sent: list[bytes] = []
        self.errors: dict[str, Exception] = {}
        next(server)
        said, server_is_next = next(client).out, True
        while said:
            self.sent.append(said)
            said = self._send("server" if server_is_next else "client", server if server_is_next else client, said)
            server_is_next = not server_is_next
        self._finish("server", server)

    def _send(self, name: str, steps: Steps, said: bytes) -> bytes:
        try:
            return steps.send(said).out
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
    met = Recorded(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    assert met.errors == {}
    assert [len(one) for one in met.sent] == [64, 64, 32, 55]
    assert not any(KEY in one for one in met.sent)


def test_every_handshake_differs() -> None:
    sent = [Recorded(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)).sent for _ in range(2)]
    assert all(first != second for first, second in zip(*sent, strict=True))


def test_another_secret_is_refused_on_both_sides() -> None:
    met = Recorded(client_steps(b"another secret!!", "echo"), server_steps(KEY, "echo", lambda: True))
    assert isinstance(met.errors["client"], AuthenticationError)
    assert isinstance(met.errors["server"], AuthenticationError)
    assert met.sent[-1] == b"\x01" + bytes(54), "it learns nothing of the server"


def test_a_replayed_proof_is_refused() -> None:
    met = Recorded(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    server = server_steps(KEY, "echo", lambda: True)
    next(server)
    server.send(met.sent[0])
    assert server.send(met.sent[2]).out[0] == 1
    with pytest.raises(AuthenticationError):
        next(server)


def test_a_replayed_server_is_refused() -> None:
    met = Recorded(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True))
    client = client_steps(KEY, "echo")
    next(client)
    client.send(met.sent[1])
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        client.send(met.sent[3])


def test_a_server_that_reflects_is_refused() -> None:
    client = client_steps(KEY, "echo")
    with pytest.raises(AuthenticationError, match="repeats"):
        client.send(next(client).out)
    client = client_steps(KEY, "echo")
    next(client)
    other = handshake._HELLO.pack(b"DSCOMPR\n", 1, b"", bytes(32))
    proof = client.send(other).out
    with pytest.raises(AuthenticationError):
        client.send(b"\0" + b"echo".ljust(22, b"\0") + proof)


def test_a_verdict_that_was_changed_is_refused() -> None:
    """So that nobody on the way can say that the server is busy, or of another service."""
    for code in (2, 3):
        client, server = client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)
        next(server)
        verdict = server.send(client.send(server.send(next(client).out).out).out).out
        with pytest.raises(AuthenticationError):
            client.send(bytes([code]) + verdict[1:])


def test_another_service_is_named_to_those_who_know_the_secret() -> None:
    met = Recorded(client_steps(KEY, "coordinator"), server_steps(KEY, "parameter server", lambda: True))
    error = met.errors["client"]
    assert isinstance(error, OtherServiceError)
    assert error.service == "parameter server"
    assert str(error) == "the server is a parameter server, not a coordinator"


def test_a_full_server_says_so() -> None:
    met = Recorded(client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: False))
    assert {name: type(one) for name, one in met.errors.items()} == dict.fromkeys(("client", "server"), ServerBusyError)


def test_another_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = client_steps(KEY, "echo"), server_steps(KEY, "echo", lambda: True)
    next(server)
    hello = bytearray(next(client).out)
    hello[9] = 2
    answer = server.send(bytes(hello)).out
    with pytest.raises(ProtocolError, match="version 2 of the transport, and this side version 1"):
        server.send(bytes(32))
    monkeypatch.setattr(handshake, "VERSION", 2)
    client = client_steps(KEY, "echo")
    next(client)
    with pytest.raises(ProtocolError, match="version 1 of the transport, and this side version 2"):
        client.send(answer)


def test_what_is_not_of_this_protocol_is_named() -> None:
    server = server_steps(KEY, "echo", lambda: True)
    next(server)
    with pytest.raises(ProtocolError, match="something else runs there"):
        server.send(b"GET / HTTP/1.1\r\n".ljust(64))
