"""A store behind a server behaves like the store that it serves, for clients with the secret."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver, open_store
from deepspeed_compress.rollout.served_store import LIMITS, STORE, ServedStore, StoreServer
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection, Limits, encode
from deepspeed_compress.transport.credentials import Credentials, Secret
from deepspeed_compress.transport.errors import AuthenticationError
from tests.support.transport import CREDENTIALS, until

KEY = CREDENTIALS.secret.key


def serve(path: Path, port: int = 0, **options: Any) -> StoreServer:
    return StoreServer(DirectoryStore(path), "127.0.0.1", port, **{"credentials": CREDENTIALS, **options})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def shared_server(directory: Path) -> Iterator[StoreServer]:
    with serve(directory) as server:
        yield server


@pytest.fixture
def server(shared_server: StoreServer, directory: Path) -> StoreServer:
    """Return a server of an empty store. Starting one for each test would take longer than the tests."""
    for file in directory.iterdir():
        file.unlink()
    return shared_server


def client(port: int, credentials: Credentials = CREDENTIALS, **options: Any) -> closing[ServedStore]:
    return closing(ServedStore(f"tcp://127.0.0.1:{port}", credentials, **options))


@pytest.fixture
def store(server: StoreServer) -> Iterator[ServedStore]:
    with client(server.port) as store:
        yield store


def test_blobs_are_stored_listed_and_deleted(store: ServedStore, directory: Path) -> None:
    assert store.names() == []
    store.put("a", b"1")
    store.put("b", b"")
    store.put("a", b"2" * 1_000_000)
    assert sorted(store.names()) == ["a", "b"]
    assert store.get("a") == b"2" * 1_000_000
    assert store.get("b") == b""
    store.delete("a")
    store.delete("a")
    with pytest.raises(KeyError, match="a"):
        store.get("a")
    assert DirectoryStore(directory).names() == ["b"]


def test_many_receivers_at_once_hold_each_version(server: StoreServer, store: ServedStore) -> None:
    model = nn.Linear(100, 100)
    publisher = Publisher(model, store)
    publisher.publish()
    end, modules = threading.Event(), [nn.Linear(100, 100, dtype=torch.bfloat16) for _ in range(12)]
    failed: list[Exception] = []

    def follow(module: nn.Module) -> None:
        with client(server.port) as own:
            receiver = Receiver(module, own)
            try:
                while not end.is_set():
                    receiver.update()
                receiver.update()
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=follow, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with torch.no_grad():
            model.weight += 1e-4 * torch.randn(100, 100)
        publisher.publish()
    end.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(torch.equal(module.weight, model.weight.bfloat16()) for module in modules)


def test_a_client_without_the_secret_is_refused_at_once(server: StoreServer) -> None:
    other = Credentials(Secret(b"another secret of at least 16 bytes", "the other file"))
    with client(server.port, other) as store, pytest.raises(AuthenticationError, match="from the other file"):
        store.names()


def test_a_body_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    with serve(tmp_path, limits=Limits(body=1000)) as server, client(server.port, attempts=2) as store:
        store.put("a", bytes(1000))
        with pytest.raises(ConnectionError, match="has failed 2 times"):
            store.put("b", bytes(1001))
        monkeypatch.setattr("deepspeed_compress.rollout.served_store.LARGEST", 500)
        with pytest.raises(OSError, match=r"b has 600 bytes \(allowed: 500\)"):
            store.put("b", bytes(600))
        with client(server.port, attempts=2) as other, pytest.raises(ConnectionError, match="a body of 1000"):
            other.get("a")
        assert store.names() == ["a"]


def connection(server: StoreServer) -> Connection:
    return connect(f"127.0.0.1:{server.port}", STORE, CREDENTIALS, limits=LIMITS)


def test_a_body_that_breaks_off_is_not_stored(server: StoreServer, store: ServedStore, directory: Path) -> None:
    store.put("a", b"1")
    with connection(server) as there:
        there.send_encoded(encode({"kind": "put", "name": "a"}, 1000) + bytes(500))
        until(lambda: any(name.endswith(".unfinished") for name in store.names()))
    until(lambda: store.names() == ["a"])
    assert store.get("a") == b"1"


def test_an_idle_connection_is_closed_and_its_client_connects_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("deepspeed_compress.rollout.served_store._IDLE", 0.1)
    with serve(tmp_path) as server, client(server.port, attempts=1) as store:
        store.put("a", b"1")
        until(lambda: not server._server._admitted)
        assert store.get("a") == b"1"


def test_an_answer_that_is_not_read_is_given_up(tmp_path: Path) -> None:
    with serve(tmp_path, limits=Limits(body=1 << 26, patience=0.3)) as server, client(server.port) as store:
        store.put("a", bytes(1 << 26))
        with connection(server) as there:
            there.send({"kind": "get", "name": "a"})
            until(lambda: len(server._server._admitted) == 1)
        assert store.get("a") == bytes(1 << 26)


def test_errors_of_the_store_reach_the_client_and_end_nothing(
    server: StoreServer, store: ServedStore, monkeypatch: Any
) -> None:
    with pytest.raises(OSError, match="is not a name of a blob"):
        store.get("../secret")
    with connection(server) as there:
        for name in ("../secret", "a/b", "A", "\0"):
            there.send({"kind": "get", "name": name})
            assert "is not a name of a blob" in (there.receive(60) or {})["why"]

    def full_disk(self: DirectoryStore, name: str, pieces: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "put_pieces", full_disk)
        with pytest.raises(OSError, match="No space left on device"):
            store.put("a", b"1")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    first = serve(tmp_path)
    with client(first.port) as store:
        store.put("a", b"1")
        first.close()
        second: list[StoreServer] = []

        def restart() -> None:
            time.sleep(0.3)
            second.append(serve(tmp_path, first.port))

        thread = threading.Thread(target=restart)
        thread.start()
        assert store.get("a") == b"1"
        thread.join()
    second[0].close()


def test_a_client_of_a_server_that_is_gone_says_so(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        pass
    with client(server.port, attempts=2) as store, pytest.raises(ConnectionError, match="has failed 2 times"):
        store.names()


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with client(port, attempts=2, timeout=0.1) as store, pytest.raises(ConnectionError, match="TimeoutError"):
            store.names()


@pytest.mark.parametrize("address", ["localhost:1", "http://a:1", "tcp://", "tcp://a:b"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a store"):
        ServedStore(address, CREDENTIALS)


def test_a_place_is_a_directory_or_an_address(server: StoreServer, directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DS_COMPRESS_SECRET", KEY.decode())
    open_store(str(directory)).put("a", b"1")
    assert open_store(str(directory)).names() == ["a"]
    with pytest.raises(ConfigError, match="is not the address of a store"):
        open_store("http://localhost:1")
    served = open_store(f"tcp://127.0.0.1:{server.port}")
    assert isinstance(served, ServedStore)
    with closing(served):
        assert served.names() == ["a"]
