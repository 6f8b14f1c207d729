"""Thousands of hostile messages to a coordinator, while honest islands exchange without disturbance."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient, status
from deepspeed_compress.local_sgd.coordinator.messages import COORDINATOR
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import HEADER, Limits, encode
from deepspeed_compress.transport.credentials import Credentials
from tests.support.hostile import COUNTS, FLOODED, Message, attack_authenticated, attack_unauthenticated, flood
from tests.support.processes import MEGABYTE, resident_memory, serve_islands
from tests.support.transport import until

pytestmark = pytest.mark.sampled(3)

TIMEOUT = 3.0
TERMS = {"timeout": TIMEOUT, "minimum": 2}


class Islands:
    """Two honest islands that exchange continuously. `seconds` are the times of the exchanges."""

    def __init__(self, address: str) -> None:
        with ThreadPoolExecutor() as pool:
            self.clients = list(pool.map(client_factory(address), range(2)))
        self.rounds: list[set[tuple[int, bool]]] = []
        self.seconds: list[float] = []
        self._end = threading.Event()
        for anchor in self._all(lambda one: one.sources()):
            assert anchor.version == 1
        self._all(lambda one: one.ready(1))
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def _all(self, call: Callable[[CoordinatorClient], object]) -> list:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(call, self.clients))

    def _exchange(self) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            found = self._all(exchange_once)
            self.seconds.append(time.monotonic() - begun)
            self.rounds.append(set(found))
            time.sleep(0.02)

    def end(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "an honest island hangs"
        for one in self.clients:
            one.leave()


def client_factory(address: str) -> Callable[[int], CoordinatorClient]:
    return lambda number: CoordinatorClient(address, 30.0, TERMS, f"host{number}:1", [f"host{number}:2"], "")


def exchange_once(client: CoordinatorClient) -> tuple[int, bool]:
    round_ = client.arrive(10)
    assert round_ is not None
    committed = client.vote(round_.id, True)
    client.version = round_.id
    return round_.id, committed


def templates(number: int) -> list[Message]:
    """Return messages of a nonexistent island, some of which resemble those of an honest one."""
    join = {"kind": "join", "name": f"hostile{number}", "terms": {"timeout": 9.0}, "store": "a:1", "addresses": ["a:2"]}
    return [
        join,
        {"kind": "beat"},
        {"kind": "ready", "version": 1},
        {"kind": "sources"},
        {"kind": "claim", "run": "x", "number": 0, "version": 3},
        {"kind": "arrive", "version": 1, "samples": 5},
        {"kind": "vote", "round": 2, "ok": False},
        {"kind": "leave"},
    ]


@COUNTS
def test_hostile_messages_do_not_disturb_honest_islands(tmp_path: Path, count: int) -> None:
    with serve_islands(tmp_path) as (address, pid):
        islands = Islands(address)
        until(lambda: len(islands.rounds) > 3)
        before = resident_memory(pid)
        assert attack_unauthenticated(address, count // 2, seed=1) > count // 4
        sent = attack_authenticated(address, COORDINATOR, Credentials.find(), templates, count // 2, seed=2)
        assert sent >= count // 2
        before_rounds = len(islands.rounds)
        until(lambda: len(islands.rounds) > before_rounds + 3)
        assert [one["number"] for one in status(address)["islands"]] == [0, 1]
        islands.end()
        assert resident_memory(pid) < before + 64 * MEGABYTE
    assert all(len(found) == 1 for found in islands.rounds), "both islands get the same outcome"
    outcomes = [outcome for found in islands.rounds for outcome in found]
    assert outcomes == [(number, True) for number in range(2, 2 + len(outcomes))]
    assert max(islands.seconds) < TIMEOUT, f"an exchange took {max(islands.seconds):.1f} s"
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "was silent" not in log
    assert len(log) < MEGABYTE


@FLOODED
@pytest.mark.parametrize(
    "message",
    [{"kind": "beat"}, {"kind": "status"}, {"kind": "beat", "text": "y" * 900_000}],
    ids=["beat", "status", "long"],
)
def test_a_flooder_that_reads_no_answers_does_not_delay_honest_islands(tmp_path: Path, message: Message) -> None:
    with serve_islands(tmp_path) as (address, pid):
        islands = Islands(address)
        before, sent = resident_memory(pid), []
        with connect(address, COORDINATOR, Credentials.find(), limits=Limits(patience=5.0)) as there:
            there.send(templates(0)[0])
            flooding = threading.Thread(target=lambda: sent.append(flood(there, encode(message), 2.5)))
            flooding.start()
            flooding.join(15)
            before_rounds = len(islands.rounds)
            assert before_rounds > 3
            until(lambda: len(islands.rounds) > before_rounds)
        islands.end()
        assert resident_memory(pid) < before + 64 * MEGABYTE
    assert sent
    assert sent[0] > 0
    assert max(islands.seconds) < TIMEOUT
    assert all(committed for found in islands.rounds for _, committed in found)


def test_a_lone_surrogate_in_a_name_does_not_disturb_honest_islands(tmp_path: Path) -> None:
    with serve_islands(tmp_path) as (address, _):
        islands = Islands(address)
        for number in range(20):
            head = json.dumps({**templates(number)[0], "name": "\ud800", "terms": TERMS}).encode()
            with connect(address, COORDINATOR, Credentials.find()) as there:
                there.send_encoded(HEADER.pack(b"DSCF", len(head), 0) + head)
                with pytest.raises(ConnectionError):
                    there.receive(60)
        islands.end()
    assert all(committed for found in islands.rounds for _, committed in found)


def test_silent_connections_use_few_resources(tmp_path: Path) -> None:
    with serve_islands(tmp_path) as (address, pid):
        islands = Islands(address)
        before, host, port = resident_memory(pid), "127.0.0.1", int(address.rpartition(":")[2])
        silent = [socket.create_connection((host, port), timeout=5) for _ in range(500)]
        time.sleep(0.5)
        assert resident_memory(pid) < before + 16 * MEGABYTE
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < 200
        islands.end()
        for one in silent:
            one.close()
    assert all(committed for found in islands.rounds for _, committed in found)
