"""Handling of unexpected and late messages by the coordinator's process and by an island."""

import os
import stat
import time
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient, status
from deepspeed_compress.local_sgd.coordinator.coordinator import StateFile, island_server
from deepspeed_compress.local_sgd.coordinator.messages import COORDINATOR
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.credentials import SECRET, SECRET_FILE, Credentials
from deepspeed_compress.transport.messages import Fields
from tests.support.coordinators import coordinator, serving
from tests.support.transport import until

JOIN = {"kind": "join", "name": "x", "terms": {"timeout": 1.0}, "store": "a:1", "addresses": []}


@pytest.mark.parametrize("message", [{"kind": "jion"}, {**JOIN, "terms": {"timeout": "soon"}}])
def test_a_malformed_message_closes_only_its_connection(message: dict) -> None:
    with coordinator() as address:
        with connect(address, COORDINATOR, Credentials.find()) as there:
            there.send(message)
            with pytest.raises(ConnectionError):
                there.receive(60)
        assert status(address)["islands"] == []
        client = CoordinatorClient(address, 60.0, {"timeout": 1.0}, "host:1", ["host:2"], "")
        assert client.number == 0
        client.leave()


def test_leave_returns_after_the_coordinator_has_removed_the_island() -> None:
    with coordinator() as address:
        client = CoordinatorClient(address, 60.0, {"timeout": 1.0}, "host:1", ["host:2"], "")
        client.leave()
        assert status(address)["islands"] == []


def test_the_log_reports_islands_that_join_and_leave_with_reasons() -> None:
    printed: list[str] = []
    server = island_server(None, "127.0.0.1", 0, printed.append)
    with serving(server):
        address, terms = f"127.0.0.1:{server.port}", {"timeout": 1.0}
        client = CoordinatorClient(address, 60.0, terms, "host:1", ["host:2"], "")
        client.leave()
        other = CoordinatorClient(address, 60.0, terms, "host:1", ["host:2"], "")
        with pytest.raises(ConfigError, match="timeout is 2"):
            CoordinatorClient(address, 60.0, {"timeout": 2.0}, "host:1", ["host:2"], "")
        with connect(address, COORDINATOR, Credentials.find()) as there:
            there.send(JOIN)
            assert there.receive(60)["kind"] == "welcome"
            until(lambda: "island 2 (a) was silent for longer than `timeout`; 1 connected" in printed)
        with connect(address, COORDINATOR, Credentials.find()) as there:
            there.send(JOIN)
            assert there.receive(60)["kind"] == "welcome"
        until(lambda: any("island 3 (a) lost its connection" in one for one in printed))
        other.leave()
    assert printed[:2] == ["island 0 (host) joined; 1 connected", "island 0 (host) left; 0 connected"]
    assert "a client at 127.0.0.1 was refused: timeout is 2.0, that of the others 1.0" in printed


def test_a_state_that_cannot_be_written_is_reported_and_delays_all_answers(tmp_path: Path) -> None:
    printed: list[str] = []
    file = StateFile(tmp_path / "here" / "state.json")
    server = island_server(file, "127.0.0.1", 0, printed.append)
    with serving(server), connect(f"127.0.0.1:{server.port}", COORDINATOR, Credentials.find()) as there:
        (tmp_path / "here").rename(tmp_path / "away")
        there.send(JOIN)
        until(lambda: any("the state cannot be written" in one for one in printed))
        assert there.receive(0.5) is None
        (tmp_path / "away").rename(tmp_path / "here")
        assert there.receive(60)["kind"] == "welcome"


def test_a_stall_of_the_coordinator_does_not_lose_islands() -> None:
    """After its disk or host has stalled, pending messages are handled before any island is lost."""
    printed: list[str] = []
    server = island_server(None, "127.0.0.1", 0, printed.append)
    with serving(server):
        client = CoordinatorClient(f"127.0.0.1:{server.port}", 60.0, {"timeout": 1.0}, "host:1", ["host:2"], "")
        with server._lock:
            time.sleep(2.0)
        assert client.sources().version == 1
        client.leave()
    assert [one for one in printed if "was silent" in one] == []


def test_a_round_that_opens_right_after_an_answer_is_noticed() -> None:
    """The message "open" arrives with the answer, before the calling thread has woken up."""
    client = object.__new__(CoordinatorClient)
    client._change = _Unshared()
    client.is_awaited, client.version, client._pending = True, 1, {"kind": "arrive"}
    client._handle("over", Fields())
    assert not client.is_awaited
    client._handle("open", Fields())
    client._ask = lambda message: Fields()  # type: ignore[method-assign]
    assert client.arrive(1) is None
    assert client.is_awaited


class _Unshared:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None: ...


def test_a_state_file_and_its_name_are_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    file = StateFile(tmp_path / "state.json")
    file.write("{}")
    file.close()
    # The file is synced before it is renamed, and then its directory is.
    assert synced == [False, True]


def test_a_connection_serves_only_one_island() -> None:
    with coordinator() as address, connect(address, COORDINATOR, Credentials.find()) as there:
        there.send(JOIN)
        assert there.receive(60)["kind"] == "welcome"
        there.send({**JOIN, "name": "y"})
        with pytest.raises(ConnectionError):
            there.receive(60)
        until(lambda: status(address)["islands"] == [])


def test_an_address_serves_only_one_server() -> None:
    with coordinator() as address, pytest.raises(OSError, match="in use"):
        island_server(None, "127.0.0.1", int(address.rpartition(":")[2]))


def test_an_island_with_another_secret_fails_at_once_and_the_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("the secret of another account")
    file.chmod(0o600)
    with coordinator() as address:
        monkeypatch.delenv(SECRET)
        monkeypatch.setenv(SECRET_FILE, str(file))
        with pytest.raises(ConfigError, match=f"a different secret.*{file}"):
            CoordinatorClient(address, 60.0, {"timeout": 1.0}, "host:1", ["host:2"], "")
