"""What the process of a coordinator, and an island, make of messages that nobody should have sent, or sent late."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from deepspeed_compress.services.rendezvous.client import Client, status
from deepspeed_compress.services.rendezvous.server import StateFile, island_server
from tests.support.coordinators import coordinator

JOIN = {"kind": "join", "name": "x", "terms": {"timeout": 1.0}, "store": "a:1", "addresses": []}


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"[" * 100_000,
        json.dumps({**JOIN, "terms": {"timeout": "soon"}}).encode(),
        json.dumps({**JOIN, "terms": ["timeout"]}).encode(),
    ],
)
def test_what_is_no_message_ends_its_connection_alone(line: bytes) -> None:
    with coordinator() as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as there:
            there.sendall(line + b"\n")
            assert there.recv(1) == b""
        assert status(address)["islands"] == []
        client = Client(address, 1.0, 5.0, {"timeout": 1.0}, "host:1", ["host:2"])
        assert client.number == 0
        client.leave()


def test_one_whose_address_another_one_has_can_be_stopped_as_any() -> None:
    """As that of an agent on each host but one."""
    with coordinator() as address:
        second = island_server(None, "127.0.0.1", int(address.rpartition(":")[2]))
        with pytest.raises(OSError, match="in use"):
            second.run()
        second.stop()


def test_others_who_are_ready_again_at_once_are_heard_of() -> None:
    """ "open" comes with the answer, before whoever has asked has woken up."""
    client = object.__new__(Client)
    client._change = _Unshared()
    client.opened, client.version, client._pending = True, 1, {"kind": "arrive"}
    client._hear({"kind": "over"})
    assert not client.opened
    client._hear({"kind": "open"})
    client._ask = lambda message: {"kind": "over"}  # type: ignore[method-assign]
    assert client.arrive(1) is None
    assert client.opened


class _Unshared:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None: ...


def test_a_state_is_on_the_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    file = StateFile(tmp_path / "state.json")
    file.write("{}")
    file.close()
    # The file before it is renamed, and then its directory.
    assert synced == [False, True]
