"""A store behind HTTP behaves like the store that it serves, for clients with the secret."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from deepspeed_compress.errors import ConfigError, RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver, open_store
from deepspeed_compress.rollout.served_store import ServedStore
from deepspeed_compress.rollout.signatures import WINDOW, Stamp
from deepspeed_compress.rollout.store_server import StoreServer
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.secret import Secret
from deepspeed_compress.transport.tls import Tls
from tests.support.transport import CREDENTIALS, make_certificates, until

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
    return closing(ServedStore(f"http://127.0.0.1:{port}", credentials, **options))


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


def test_a_server_without_the_secret_is_not_believed(tmp_path: Path, monkeypatch: Any) -> None:
    """Such a server accepts everything, because it cannot check it, and signs its answers with another secret."""
    other = Credentials(Secret(b"another secret of at least 16 bytes", "the tests"))
    monkeypatch.setattr(Stamp, "has_signature", lambda self, key, signature: True)
    with (
        serve(tmp_path, credentials=other) as server,
        client(server.port, attempts=1) as store,
        pytest.raises(ConnectionError, match="the signature of an answer with the status 200 is wrong"),
    ):
        store.names()


def signed(method: str, name: str, body: bytes = b"", late: int = 0) -> dict[str, str]:
    stamp = Stamp.new(method, name, body)
    return replace(stamp, time=stamp.time - late).headers(KEY)


def send(server: StoreServer, method: str, name: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{server.port}/blobs/{name}", content=body, headers=headers)


@pytest.mark.parametrize(
    ("method", "name", "body"), [("PUT", "b", b"1"), ("PUT", "a", b"2"), ("DELETE", "a", b""), ("GET", "a", b"")]
)
def test_a_signature_holds_for_one_request(
    method: str, name: str, body: bytes, server: StoreServer, directory: Path
) -> None:
    answer = send(server, method, name, body, signed("PUT", "a", b"1"))
    assert answer.status_code == (422 if (method, name) == ("PUT", "a") else 401)
    assert DirectoryStore(directory).names() == []


def test_a_recorded_request_is_refused(server: StoreServer) -> None:
    headers = signed("PUT", "a", b"1")
    assert send(server, "PUT", "a", b"1", headers).status_code == 200
    assert "was carried out before" in send(server, "PUT", "a", b"1", headers).text
    headers = signed("GET", "a")
    assert [send(server, "GET", "a", b"", headers).status_code for _ in range(3)] == [200, 401, 401]
    old = send(server, "PUT", "a", b"1", signed("PUT", "a", b"1", late=WINDOW + 5))
    assert old.status_code == 401
    assert "the clocks of client and server differ by 30" in old.text


@pytest.mark.parametrize("headers", [{}, {"x-store-time": "1" * 5000}, {"x-store-signature": "\xe9"}])
def test_a_request_without_a_signature_is_refused(headers: dict[str, str], server: StoreServer) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert send(server, "GET", "a", b"", {**signed("GET", "b"), **encoded}).status_code == 401
    assert httpx.get(f"http://127.0.0.1:{server.port}/blobs/", headers=encoded).status_code == 401


def test_a_body_that_is_not_signed_is_not_read(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as there:
        there.sendall(b"PUT /blobs/a HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n" + bytes(1000))
        assert there.recv(100).startswith(b"HTTP/1.1 401")


def test_a_body_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    with serve(tmp_path, largest=1000) as server, client(server.port, attempts=2) as store:
        store.put("a", bytes(1000))
        with pytest.raises(OSError, match="the body has more than 1000 bytes"):
            store.put("b", bytes(1001))
        chunks = iter([bytes(600)] * 2)
        chunked = send(server, "PUT", "b", chunks, signed("PUT", "b", bytes(1200)))
        assert chunked.status_code == 413
        monkeypatch.setattr("deepspeed_compress.rollout.served_store.LARGEST", 500)
        with pytest.raises(OSError, match=r"b has 600 bytes \(allowed: 500\)"):
            store.put("b", bytes(600))
        with pytest.raises(ConnectionError, match="an answer has more than 500 bytes"):
            store.get("a")
        assert store.names() == ["a"]


@contextmanager
def opened(server: StoreServer, sent: bytes) -> Iterator[socket.socket]:
    """Yield a connection with a small buffer for answers, over which `sent` was sent."""
    with socket.socket() as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        there.settimeout(10)
        there.connect(("127.0.0.1", server.port))
        there.sendall(sent)
        yield there


def request(method: str, name: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"{method} /blobs/{name} HTTP/1.1", "Host: a", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{key}: {value}" for key, value in headers.items()), "", ""]).encode()


def received(there: socket.socket) -> int:
    """Return the number of bytes that arrive until the server closes the connection."""
    count = 0
    with suppress(ConnectionResetError):
        while chunk := there.recv(1 << 16):
            count += len(chunk)
    return count


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: Any) -> Iterator[StoreServer]:
    """Return a server that serves one request at a time, and closes connections on which nothing happens."""
    monkeypatch.setattr("deepspeed_compress.rollout.store_server._IDLE", 0.2)
    monkeypatch.setattr("deepspeed_compress.rollout.store_server._AT_ONCE", 1)
    with serve(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", False),
        (b"GET /blobs/a HTTP/1.1\r\nHost: ", False),
        (b"PUT /blobs/a HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", True),
    ],
)
def test_a_request_that_never_ends_is_given_up(sent: bytes, answered: bool, impatient: StoreServer) -> None:
    with opened(impatient, sent) as there:
        for _ in range(5 if sent else 0):
            time.sleep(0.1)
            with suppress(OSError):
                there.sendall(b"a")
        assert (received(there) > 0) == answered


def test_an_answer_that_is_not_read_is_given_up(impatient: StoreServer) -> None:
    with client(impatient.port) as store:
        store.put("a", bytes(1 << 24))
        # The second answer waits for the first one, and would keep its slot.
        twice = b"".join(request("GET", "a", 0, signed("GET", "a")) for _ in range(2))
        with opened(impatient, twice) as there:
            until(lambda: not impatient._server.server_state.connections)
            assert received(there) < 1 << 24
        assert store.get("a") == bytes(1 << 24)


@contextmanager
def damaging(port: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the port of a proxy for one connection, and a list of texts, which the proxy damages once each."""
    texts: list[bytes] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            for text in [one for one in texts if one in data]:
                texts.remove(text)
                data = data.replace(text, b"x" * len(text))
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def run() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=pump, args=(server, client))
            back.start()
            pump(client, server)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1], texts
        thread.join()


def test_a_body_that_arrives_damaged_is_sent_again(server: StoreServer) -> None:
    with damaging(server.port) as (port, texts), client(port) as store:
        texts.append(b"the content")
        store.put("a", b"the content")
        assert not texts
        texts.append(b"the content")
        assert store.get("a") == b"the content"
        assert not texts


def test_a_signature_that_arrives_damaged_is_no_wrong_secret(server: StoreServer, store: ServedStore) -> None:
    store.put("a", b"1")
    with damaging(server.port) as (port, texts), client(port) as own:
        texts.append(b"x-store-signature")
        assert own.get("a") == b"1"
        assert not texts


def test_errors_of_the_store_reach_the_client_and_end_nothing(
    server: StoreServer, store: ServedStore, monkeypatch: Any
) -> None:
    with pytest.raises(RolloutError, match="is not a name of a blob"):
        store.get("../secret")
    for name in ("..%2fsecret", "a/b", "A", "%00"):
        answer = send(server, "GET", name, b"", signed("GET", httpx.URL(f"http://a/{name}").path[1:]))
        assert (answer.status_code, "is not a name of a blob" in answer.text) == (400, True)

    def full_disk(self: DirectoryStore, name: str, data: bytes) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "put", full_disk)
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
        with client(port, attempts=2, timeout=0.1) as store, pytest.raises(ConnectionError, match="ReadTimeout"):
            store.names()


def test_an_answer_that_never_ends_is_given_up(server: StoreServer, store: ServedStore, monkeypatch: Any) -> None:
    store.put("a", b"1")
    monkeypatch.setattr("deepspeed_compress.rollout.served_store._PATIENCE", -1.0)
    with client(server.port, attempts=1) as own, pytest.raises(ConnectionError, match="an answer takes more than"):
        own.get("a")


def test_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    credentials = replace(CREDENTIALS, tls=Tls.load(files["member"], files["authority"]))
    with serve(tmp_path / "store", credentials=credentials) as server:
        with closing(ServedStore(f"https://localhost:{server.port}", credentials)) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"
        stranger = replace(CREDENTIALS, tls=Tls.load(files["stranger"], files["other_authority"]))
        refused = ServedStore(f"https://localhost:{server.port}", stranger, attempts=1)
        with closing(refused), pytest.raises(ConnectionError):
            refused.names()
        with pytest.raises(ConfigError, match='does not use TLS, which is configured; write "https://a:1"'):
            ServedStore("http://a:1", credentials)


@pytest.mark.parametrize("address", ["localhost:1", "ftp://a:1", "http://", "http://a:b"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a store"):
        ServedStore(address, CREDENTIALS)


def test_a_place_is_a_directory_or_an_address(server: StoreServer, directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DS_COMPRESS_SECRET", KEY.decode())
    open_store(str(directory)).put("a", b"1")
    assert open_store(str(directory)).names() == ["a"]
    served = open_store(f"http://127.0.0.1:{server.port}")
    assert isinstance(served, ServedStore)
    with closing(served):
        assert served.names() == ["a"]


@pytest.mark.parametrize(("module", "package"), [("served_store", "httpx"), ("store_server", "uvicorn")])
def test_a_missing_package_names_the_extra(module: str, package: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"deepspeed_compress.rollout.{module}")
    with pytest.raises(ImportError, match=rf'needs {package}.*pip install -e ".*\[http\]"'):
        import_module(f"deepspeed_compress.rollout.{module}")
