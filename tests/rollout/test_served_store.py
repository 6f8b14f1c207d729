"""A store behind TCP behaves like the store that it serves, for clients with the secret."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver, ServedStore, StoreServer
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.secret import Secret
from tests.support.transport import CREDENTIALS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with StoreServer(DirectoryStore(tmp_path), "127.0.0.1", 0, CREDENTIALS) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[ServedStore]:
    with closing(ServedStore(f"127.0.0.1:{server.port}", CREDENTIALS)) as store:
        yield store


def test_blobs_are_stored_listed_and_deleted(store: ServedStore, tmp_path: Path) -> None:
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
    assert DirectoryStore(tmp_path).names() == ["b"]


def test_versions_reach_a_receiver(store: ServedStore) -> None:
    model, module = nn.Linear(100, 100), nn.Linear(100, 100, dtype=torch.bfloat16)
    publisher, receiver = Publisher(model, store), Receiver(module, store)
    for _ in range(3):
        publisher.publish()
        assert receiver.update()
        assert torch.equal(module.weight, model.weight.bfloat16())
        with torch.no_grad():
            model.weight += 1e-4 * torch.randn(100, 100)


def test_a_client_without_the_secret_is_refused(server: StoreServer) -> None:
    other = Credentials(Secret(b"another secret of at least 16 bytes", "the tests"))
    with pytest.raises(AuthenticationError):
        ServedStore(f"127.0.0.1:{server.port}", other).names()


def test_errors_of_the_store_reach_the_client_and_end_nothing(store: ServedStore) -> None:
    with pytest.raises(OSError, match="is not a name of a blob"):
        store.get("../secret")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_client_connects_again_after_its_connection_was_lost(server: StoreServer, store: ServedStore) -> None:
    store.put("a", b"1")
    assert store._connection is not None
    store._connection.end()
    assert store.get("a") == b"1"


def test_a_client_of_a_server_that_is_gone_says_so(tmp_path: Path) -> None:
    with StoreServer(DirectoryStore(tmp_path), "127.0.0.1", 0, CREDENTIALS) as server:
        pass
    with closing(ServedStore(f"127.0.0.1:{server.port}", CREDENTIALS)) as store, pytest.raises(ConnectionError):
        store.names()


def test_names_are_refused_before_they_become_paths(tmp_path: Path) -> None:
    with pytest.raises(RolloutError):
        DirectoryStore(tmp_path).put("a/b", b"")
