"""Connections over sockets: frames in both directions, limits, deadlines, floods, and shutdown."""

import os
import random
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from deepspeed_compress.transport.client import connect, parse_address
from deepspeed_compress.transport.connection import DEFAULT_LIMITS, HEADER, Connection, Limits, encode
from deepspeed_compress.transport.credentials import Credentials, Secret, Tls
from deepspeed_compress.transport.errors import (
    AuthenticationError,
    ConnectionClosedError,
    OtherServiceError,
    ServerBusyError,
)
from deepspeed_compress.transport.machine_server import ConnectedClient
from deepspeed_compress.transport.server import Bounds, Server
from tests.support.transport import CREDENTIALS, SERVICE, connected, make_certificates, serving, unauthenticated, until

MEGABYTE = 1 << 20
ENDED = "closed|reset|Broken pipe"


def test_frames_arrive_complete_in_both_directions() -> None:
    draw = random.Random(0)
    limits = Limits(body=4 * MEGABYTE)
    with serving(limits=limits) as server, connected(server, limits=limits) as there:
        for size in (0, 1, 1000, 3 * MEGABYTE + 17):
            body = draw.randbytes(size)
            there.send({"kind": "x", "size": size}, body)
            assert there.receive(60) == {"kind": "x", "size": size}
            assert there.left == size
            assert there.read_body() == body
        there.send_pieces({"kind": "y"}, 6, iter([b"ab", b"", b"cdef"]))
        there.receive(60)
        memory = bytearray(4)
        there.read_into(memory)
        assert (memory, there.left) == (b"abcd", 2)
        there.send({"kind": "z"})
        assert there.receive(60) == {"kind": "z"}, "the unread rest of a body is dropped"


@pytest.mark.parametrize("tampered", [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(b"DSCF", 2**32 - 1, 0), b"\0" * 500])
def test_an_invalid_frame_ends_only_its_connection(tampered: bytes) -> None:
    with serving() as server, connected(server) as there, connected(server) as other:
        there._channel.write(memoryview(tampered), time.monotonic() + 60)
        with pytest.raises(OSError, match=ENDED):
            there.receive(60)
        other.send({"kind": "x"})
        assert other.receive(60) == {"kind": "x"}


def test_an_announced_body_allocates_no_memory() -> None:
    limits = Limits(head=DEFAULT_LIMITS.head, body=1 << 40)
    with serving(limits=limits) as server:
        tracemalloc.start()
        try:
            for head, body in ((MEGABYTE, 0), (0, 1 << 40)):
                there = connected(server)
                text = b"" if head else encode({"kind": "x"}, body)
                there._channel.write(memoryview(text or HEADER.pack(b"DSCF", head, body)), time.monotonic() + 60)
                time.sleep(0.2)
                there.close()
            assert tracemalloc.get_traced_memory()[1] < 2 * MEGABYTE
        finally:
            tracemalloc.stop()


def test_an_incomplete_frame_times_out() -> None:
    with serving(limits=Limits(patience=0.3)) as server:
        there = connected(server)
        there._channel.write(memoryview(encode({"kind": "x"})[:-1]), time.monotonic() + 60)
        begun = time.monotonic()
        with pytest.raises(OSError, match=ENDED):
            there.receive(60)
        assert 0.2 < time.monotonic() - begun < DEFAULT_LIMITS.patience / 2
        there.close()


def test_a_write_times_out_if_the_other_side_does_not_read() -> None:
    silent = threading.Event()
    with serving(lambda connection: bool(silent.wait(10)) or None) as server:
        there = connected(server, limits=Limits(patience=0.3))
        with pytest.raises(TimeoutError):
            there.send({"kind": "x"}, bytes(64 * MEGABYTE))
        assert there.has_hung_up()
        there.close()
        silent.set()


@pytest.mark.parametrize("size", [5, 7])
def test_pieces_of_the_wrong_size_end_the_connection(size: int) -> None:
    with serving(limits=Limits(body=10)) as server, connected(server) as there:
        with pytest.raises(ValueError, match="do not add up to the announced size"):
            there.send_pieces({"kind": "x"}, 6, [bytes(size)])
        assert there.has_hung_up()


def test_the_error_of_a_wrong_secret_names_the_file_to_copy() -> None:
    log: list[str] = []
    wrong = Credentials(Secret(b"another secret of somebody else", "/home/me/.deepspeed_compress/secret"))
    with serving(log=log.append) as server:
        with pytest.raises(AuthenticationError) as caught:
            connected(server, wrong)
        assert "has a different secret" in str(caught.value)
        assert "/home/me/.deepspeed_compress/secret" in str(caught.value)
        assert "DS_COMPRESS_SECRET_FILE" in str(caught.value)
        until(lambda: len(log) == 1)
        assert log == [
            "refused a connection from 127.0.0.1: the client has a different secret (the secret of this server is from "
            "the tests)"
        ]
        assert not server._admitted


def test_clients_learn_of_another_service_and_of_a_full_server() -> None:
    with serving(bounds=Bounds(connections=1)) as server:
        with pytest.raises(OtherServiceError):
            connect(f"127.0.0.1:{server.port}", "other", CREDENTIALS)
        with connected(server), pytest.raises(ServerBusyError):
            connected(server)
        until(lambda: not server._admitted)
        connected(server).close()


@pytest.mark.slow
def test_unauthenticated_connections_are_limited_in_number_and_time() -> None:
    before = threading.active_count()
    with serving(bounds=Bounds(pending=8, patience=5.0)) as server:
        flood = [unauthenticated(server) for _ in range(30)]
        with connected(server) as there:
            there.send({"kind": "x"})
            assert there.receive(60) == {"kind": "x"}
        # Threads of displaced connections end soon, long before the time to authenticate is over.
        until(lambda: threading.active_count() - before < 15, seconds=3.0)
        assert sum(map(is_closed, flood)) >= 22
        until(lambda: all(map(is_closed, flood)))
        for one in flood:
            one.close()


def is_closed(there: socket.socket) -> bool:
    there.settimeout(0.01)
    try:
        return there.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_flood_does_not_lock_out_an_honest_client() -> None:
    """The flood opens connections as fast as it can, and sends partial hellos or random bytes."""
    bounds, end = Bounds(pending=32, patience=2.0), threading.Event()
    with serving(bounds=bounds) as server:
        threads = [threading.Thread(target=flood, args=(server, end, seed)) for seed in range(2)]
        for one in threads:
            one.start()
        try:
            for _ in range(20):
                with connected(server) as there:
                    there.send({"kind": "x"})
                    assert there.receive(60) == {"kind": "x"}
        finally:
            end.set()
            for one in threads:
                one.join()


def flood(server: Server, end: threading.Event, seed: int) -> None:
    draw, connections = random.Random(seed), []
    while not end.is_set():
        try:
            one = unauthenticated(server)
            one.sendall(draw.choice([b"", b"DSCOMPR\n\0\1", draw.randbytes(64), draw.randbytes(5000)]))
        except OSError:
            continue
        connections.append(one)
        if len(connections) > 50:
            connections.pop(0).close()
    for one in connections:
        one.close()


def test_a_shutdown_does_not_wait_for_clients() -> None:
    """`serving` checks the time. One client is unauthenticated, one is silent, and one does not read."""
    held: list[Connection] = []

    def answer(connection: Connection) -> None:
        connection.receive()
        connection.send({"kind": "x"}, bytes(64 * MEGABYTE))

    with serving(answer) as server:
        silent, unread = unauthenticated(server), connected(server)
        held.extend([connected(server), unread])
        unread.send({"kind": "x"})
        time.sleep(0.2)
    silent.close()
    for one in held:
        one.close()


def test_a_shutdown_with_drain_lets_running_calls_finish() -> None:
    begun, ended = threading.Event(), []

    def slow(connection: Connection) -> None:
        connection.receive()
        begun.set()
        time.sleep(0.4)
        connection.send({"kind": "done"})
        ended.append(connection)

    server = Server(SERVICE, slow, "127.0.0.1", 0, CREDENTIALS)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with connected(server) as there:
        there.send({"kind": "x"})
        assert begun.wait(60)
        server.stop(drain=5.0)
        assert there.receive(60) == {"kind": "done"}
    thread.join(60)
    assert not thread.is_alive()
    assert len(ended) == 1
    with pytest.raises(ConnectionRefusedError):
        unauthenticated(server)


def test_an_error_in_the_service_ends_one_connection_and_is_logged() -> None:
    log: list[str] = []

    def fail(connection: Connection) -> None:
        head = connection.receive()
        assert head is not None
        connection.send({"kind": head["missing"]})

    with serving(fail, log=log.append) as server:
        with connected(server) as there:
            there.send({"kind": "x"})
            with pytest.raises(OSError, match=ENDED):
                there.receive(60)
        until(lambda: log != [])
        assert log[0].endswith("was closed: KeyError: 'missing'")
        with connected(server) as there:
            there.send({"kind": "x", "missing": "y"})
            assert there.receive(60) == {"kind": "y"}


def test_a_client_that_does_not_read_is_disconnected_before_memory_fills() -> None:
    queues: list[ConnectedClient] = []

    def talk(connection: Connection) -> None:
        queues.append(ConnectedClient(connection, count=10_000, size=MEGABYTE))
        while queues[0].put({"kind": "x", "text": "y" * 10_000}):
            pass
        assert connection.receive() is None

    with serving(talk) as server, connected(server):
        until(lambda: bool(queues) and not server._admitted)
        assert queues[0]._bytes <= MEGABYTE + 20_000


def test_a_flush_returns_after_all_queued_messages_are_written_in_order() -> None:
    def talk(connection: Connection) -> None:
        queue = ConnectedClient(connection)
        for number in range(100):
            assert queue.put({"kind": "x", "number": number})
        queue.flush(5.0)
        queue.end()

    with serving(talk) as server, connected(server) as there:
        assert [(there.receive(60) or {})["number"] for _ in range(100)] == list(range(100))
        with pytest.raises(ConnectionClosedError):
            there.receive(60)


@pytest.fixture
def many_descriptors() -> Iterator[list[int]]:
    """Occupy all file descriptors below 1,100."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, before[1]), before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1100:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    yield taken
    for one in taken:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_large_descriptor_numbers_work(many_descriptors: list[int]) -> None:
    with serving() as server, connected(server) as there:
        assert there._channel.socket.fileno() > 1023
        there.send({"kind": "x"})
        assert there.receive(60) == {"kind": "x"}
        assert not there.has_hung_up()
    assert there.has_hung_up()


def test_a_server_recovers_after_running_out_of_descriptors(many_descriptors: list[int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as server:
        waiting = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1, before[1]))
        waiting.connect(("127.0.0.1", server.port))
        used = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.3, "the server spins"
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with connected(server) as there:
            there.send({"kind": "x"})
            assert there.receive(60) == {"kind": "x"}
        waiting.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("localhost:1", ("localhost", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:7", ("::1", 7))],
)
def test_valid_addresses_are_parsed(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


@pytest.mark.parametrize("address", ["", "here", "here:", ":1", "here:65536", "::1:7", "a b:1", "here:-1"])
def test_invalid_addresses_are_named(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(address)


def test_only_certificates_of_the_same_authority_are_accepted(tmp_path) -> None:
    files = make_certificates(tmp_path)
    member = Credentials(CREDENTIALS.secret, Tls(files["member"], files["authority"]))
    stranger = Credentials(CREDENTIALS.secret, Tls(files["stranger"], files["authority"]))
    elsewhere = Credentials(CREDENTIALS.secret, Tls(files["stranger"], files["other_authority"]))
    wrong = Credentials(Secret(b"another secret of somebody", "a test"), member.tls)
    body = random.Random(0).randbytes(3 * MEGABYTE)
    limits = Limits(body=len(body))
    with serving(credentials=member, limits=limits) as server:
        with connected(server, member, limits) as there:
            sender = threading.Thread(target=there.send, args=({"kind": "x"}, body))
            # Both directions at once, which OpenSSL alone does not allow.
            sender.start()
            assert there.receive(60) == {"kind": "x"}
            assert there.read_body() == body
            sender.join()
        for other in (elsewhere, wrong):
            with pytest.raises(AuthenticationError):
                connected(server, other)
        for unknown in (stranger, CREDENTIALS):
            # In TLS 1.3 the server sends the reason after the client has begun to send, so it may be lost.
            with pytest.raises(OSError, match=r"only one side uses TLS, or|TLS failed"):
                connected(server, unknown)
        with connected(server, member) as there:
            there.send({"kind": "x"})
            assert there.receive(60) == {"kind": "x"}
    with serving() as server, pytest.raises(OSError, match=r"only one side uses TLS, or|TLS failed"):
        connected(server, member)


def test_a_connection_survives_a_receive_timeout() -> None:
    with serving() as server, connected(server) as there:
        assert there.receive(0.05) is None
        there.send({"kind": "x"})
        assert there.receive(60) == {"kind": "x"}


def test_arrived_returns_all_waiting_messages() -> None:
    with serving() as server, connected(server) as there:
        assert there.arrived(0.01) == []
        for number in range(3):
            there.send({"kind": "x", "number": number})
        found: list[int] = []
        until(lambda: bool(found.extend(one["number"] for one in there.arrived(0.1)) or len(found) == 3))
        assert found == [0, 1, 2]


PAUSE = 0.05


def trickle(connection: Connection, data: bytes) -> None:
    for byte in data:
        connection._channel.write(memoryview(bytes([byte])), time.monotonic() + 60)
        time.sleep(PAUSE)


def test_a_trickle_of_bytes_does_not_extend_the_deadline_of_a_head() -> None:
    with serving(limits=Limits(patience=0.5)) as server:
        there = connected(server)
        begun, frame = time.monotonic(), encode({"kind": "x" * 500})
        with pytest.raises(OSError, match=ENDED):
            trickle(there, frame)
        assert time.monotonic() - begun < PAUSE * len(frame)
        there.close()


def test_connecting_to_a_silent_listener_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(f"127.0.0.1:{port}", SERVICE, CREDENTIALS, timeout=0.2)
        assert time.monotonic() - begun < 5, "the default timeout"


def test_both_sides_check_the_authority(tmp_path) -> None:
    """A client refuses a server whose certificate is from another authority."""
    files = make_certificates(tmp_path)
    elsewhere = Credentials(CREDENTIALS.secret, Tls(files["stranger"], files["other_authority"]))
    member = Credentials(CREDENTIALS.secret, Tls(files["member"], files["authority"]))
    with serving(credentials=elsewhere) as server, pytest.raises(AuthenticationError, match="one authority"):
        connected(server, member)
