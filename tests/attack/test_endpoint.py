"""Connections and requests that would take an endpoint from an honest client: idle, slow, forged, or abandoned."""

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install -e .[http]")

from tests.support.endpoints import CHAT, SECRET, Sampler, body_of, head_of, request, served
from tests.support.processes import resident_memory
from tests.support.siege import besieged, drip, medians, open_unread, serving_process

DESCRIPTORS = 1024
SERVE = """
import socket, sys
from pathlib import Path
from tests.support.endpoints import Sampler, served
with served(Path(sys.argv[1]), Sampler(seconds=0.002)) as port:
    print(port, flush=True)
    sys.stdin.read()
"""
"""Program with an endpoint in front of a server that samples for 2 ms per token."""


HONEST = request(body_of(16))
FORGED = (
    request(body_of(16), secret="wrong"),
    request(body_of(16), path="/v1/nothing"),
    request(b"[" * 5000),
    request(body_of(16, model="gpt-5")),
    head_of(1 << 40),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
    HONEST.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
)


def ask(port: int, body: bytes = body_of(16)) -> tuple[int, Any]:
    """Return the status and the content of the answer to a client with a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as client:
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        client.request("POST", CHAT, body, headers)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


def check_answered(port: int) -> None:
    status, answer = ask(port)
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 16)


def abandon(port: int, count: int) -> None:
    """Send requests for thousands of tokens, and disconnect while they are sampled."""
    with contextlib.ExitStack() as clients:
        for _ in range(count):
            there = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            there.sendall(request(body_of(8000)))
        time.sleep(0.3)


@contextlib.contextmanager
def attacked(port: int) -> Iterator[None]:
    """Attack by idle, dripping, forging and replaying clients, by some that read nothing, and by some that give up.

    Each of those that drip sends four bytes a second.
    """
    unfinished = [drip(b"POST / HTTP/1.1\r\nX: " + b"x" * 5000)] * 128 + [[head_of(100_000), *drip(b"1" * 5000)]] * 128
    whole = [[sent] for sent in (*FORGED, HONEST) for _ in range(8)]
    with contextlib.ExitStack() as unread:
        for _ in range(64):
            unread.enter_context(open_unread(port, request(b"", path="/v1/models", method="GET") * 100))
        abandon(port, 20)
        with besieged(port, [*[[]] * 256, *unfinished, *whole], every=5):
            yield


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Yield the id of a process with an endpoint, and its port. Whatever is sent to it, its log must stay short."""
    with (
        (tmp_path / "log").open("wb") as log,
        serving_process(SERVE, tmp_path / "weights", log=log, descriptors=DESCRIPTORS) as (process, port),
    ):
        check_answered(port)
        yield process, port
    assert (tmp_path / "log").stat().st_size < 4096


@pytest.mark.serial
def test_a_client_waits_at_most_twice_as_long_while_an_endpoint_is_attacked(endpoint: tuple[int, int]) -> None:
    process, port = endpoint
    before = resident_memory(process)
    alone, under = medians(lambda: check_answered(port), lambda: attacked(port))
    # See docs/security.md: 0.2 MB for each connection.
    assert resident_memory(process) - before < 800 * 0.2e6
    assert under <= 2 * alone


def is_closed(there: socket.socket, within: float) -> bool:
    """Return True if the server ends a connection in time. What it has sent before is read."""
    there.settimeout(within)
    try:
        while there.recv(1 << 16):
            continue
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("begun", [b"", HONEST[:40], HONEST[:-1], HONEST + HONEST[:40]], ids=len)
def test_a_client_that_does_not_send_a_whole_request_in_time_is_disconnected(begun: bytes, tmp_path: Path) -> None:
    with served(tmp_path, Sampler(), patience=0.5) as port, socket.create_connection(("127.0.0.1", port)) as there:
        there.sendall(begun)
        assert not is_closed(there, 0.3)
        assert is_closed(there, 60.0)
        check_answered(port)


def test_answers_take_as_long_as_they_take(tmp_path: Path) -> None:
    sampler = Sampler()
    sampler.allowed.clear()
    with served(tmp_path, sampler, patience=0.3) as port, socket.create_connection(("127.0.0.1", port)) as there:
        there.sendall(request(body_of(2)))
        assert not is_closed(there, 1.5)
        sampler.allowed.set()
        there.settimeout(60)
        assert there.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_the_client_that_has_waited_longest_makes_room_for_a_new_one(tmp_path: Path) -> None:
    with served(tmp_path, Sampler(), most=4) as port, contextlib.ExitStack() as clients:
        crowd = [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        for _ in range(3):
            check_answered(port)
        assert [is_closed(there, 0.2) for there in crowd] == [True, False, False, False]


def test_clients_that_do_not_read_cost_bounded_memory_and_are_disconnected(tmp_path: Path) -> None:
    """Each of their answers has 3 MB, of which the server sends what a connection takes."""
    with served(tmp_path, Sampler(), patience=1.0) as port, contextlib.ExitStack() as unread:
        check_answered(port)
        before = resident_memory(os.getpid())
        crowd = [unread.enter_context(open_unread(port, request(body_of(1_000_000)))) for _ in range(16)]
        check_answered(port)
        time.sleep(10.0)
        # Ten times the answers, because this process has vLLM's place, too, and both encode and decode them.
        assert resident_memory(os.getpid()) - before < 10 * 16 * 3_000_000
        sizes = [sum(map(len, iter(partial(there.recv, 1 << 16), b""))) for there in crowd]
        assert max(sizes) < 3_000_000
        check_answered(port)


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_in_flight_are_bounded(chunked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_compress.agents.serving._MOST_BODIES", 1 << 20)
    size, large = 7 << 17, body_of(16, metadata={"a": "x" * (1 << 18)})
    head, body = head_of(size), b"1" * (size - 1)
    if chunked:
        head = head.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nX") + f"{size:x}\r\n".encode()
    with served(tmp_path, Sampler()) as port, socket.create_connection(("127.0.0.1", port)) as there:
        assert ask(port, large)[0] == 200
        there.sendall(head + body)
        time.sleep(0.5)
        status, refused = ask(port, large)
        assert (status, refused["error"]["type"]) == (429, "invalid_request_error")
        check_answered(port)
        there.close()
        while (status := ask(port, large)[0]) == 429:
            time.sleep(0.05)
        assert status == 200


STATUSES = {400, 404}
CONTENTS = ('"\\ud800"', '"\\u0000"', "1e999", "-1", "9" * 5000, "NaN", "[" * 3000 + "]" * 3000, "null", "{}", '[""]')


def is_passed_on(body: bytes) -> bool:
    """Return True if nothing but vLLM can find a problem in a request."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("model") in (None, "policy") and not fields.get("stream")


def test_forged_requests_get_errors_of_openais_form(tmp_path: Path) -> None:
    """Errors name what is wrong, and never are those of the server. Most fields are left to vLLM."""
    message = {"role": "user", "content": "1"}
    fields = ("model", "messages", "max_tokens", "temperature", "n", "stop", "tools", "stream", "seed", "x")
    bodies = [b"", b"null", b"\xff", b'{"messages"', b"[]", b"{}", body_of(10**6), body_of(16, n=129)]
    for field in fields:
        bodies += [f'{{"messages": [{json.dumps(message)}], "{field}": {content}}}'.encode() for content in CONTENTS]
    for content in CONTENTS:
        bodies.append(f'{{"messages": [{{"role": {content}, "content": {content}}}]}}'.encode())
    with served(tmp_path, Sampler()) as port:
        for body in bodies:
            status, answer = ask(port, body)
            assert (status == 200) == is_passed_on(body), (body[:200], answer)
            if status != 200:
                assert status in STATUSES, (body[:200], answer)
                assert {*answer["error"]} == {"message", "type", "param", "code"}
                assert isinstance(answer["error"]["message"], str)
