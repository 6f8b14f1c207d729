"""Ten thousand hostile messages for a coordinator, while honest islands go on as if nothing were there."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient, status
from deepspeed_compress.local_sgd.coordinator.wire import COORDINATOR
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.frames import HEADER, Limits, encode
from tests.support.hostile import Message, attack_authenticated, attack_unauthenticated, flood
from tests.support.transport import until

COUNT = 10_000
TIMEOUT = 3.0
TERMS = {"timeout": TIMEOUT, "minimum": 2}
MEGABYTES = 1 << 20


class Islands:
    """Two honest islands that exchange without a break. `gaps`: seconds that each answer took."""

    def __init__(self, address: str) -> None:
        with ThreadPoolExecutor() as pool:
            self.clients = list(pool.map(partial_client(address), range(2)))
        self.rounds: list[set[tuple[int, bool]]] = []
        self.gaps: list[float] = []
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
            found = self._all(one_round)
            self.gaps.append(time.monotonic() - begun)
            self.rounds.append(set(found))
            time.sleep(0.02)

    def end(self) -> None:
        self._end.set()
        self._thread.join(20)
        assert not self._thread.is_alive(), "an honest island waits"
        for one in self.clients:
            one.leave()


def partial_client(address: str) -> Callable[[int], CoordinatorClient]:
    return lambda number: CoordinatorClient(address, TIMEOUT, 30.0, TERMS, f"host{number}:1", [f"host{number}:2"])


def one_round(client: CoordinatorClient) -> tuple[int, bool]:
    round_ = client.arrive(10)
    assert round_ is not None
    outcome = client.vote(round_.id, True)
    client.version = round_.id
    return outcome.id, outcome.committed


@contextmanager
def serving(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The address and the process id of a coordinator that is a process of its own."""
    command = [sys.executable, "-m", "deepspeed_compress.cli", "islands", "serve", "--port", "0"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen([*command, "--state", str(tmp_path / "state.json")], stdout=log, stderr=log) as process,
    ):
        try:
            until(lambda: b"port " in (tmp_path / "log").read_bytes(), 60)
            port = (tmp_path / "log").read_text().split("port ")[1].split()[0]
            yield f"127.0.0.1:{port}", process.pid
            assert process.poll() is None, (tmp_path / "log").read_text()
        finally:
            process.kill()


def memory(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def templates(number: int) -> list[Message]:
    """Messages of an island that is not there, some of which look like those of one that is."""
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


def test_ten_thousand_hostile_messages_disturb_nobody(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, pid):
        islands = Islands(address)
        until(lambda: len(islands.rounds) > 3, 20)
        before = memory(pid)
        assert attack_unauthenticated(address, COUNT // 2, seed=1) > COUNT // 4
        sent = attack_authenticated(address, COORDINATOR, Credentials.find(), templates, COUNT // 2, seed=2)
        assert sent >= COUNT // 2
        met = len(islands.rounds)
        until(lambda: len(islands.rounds) > met + 3, 20)
        assert [one["number"] for one in status(address)["islands"]] == [0, 1]
        islands.end()
        assert memory(pid) < before + 64 * MEGABYTES
    assert all(len(found) == 1 for found in islands.rounds), "both are told the same"
    outcomes = [outcome for found in islands.rounds for outcome in found]
    assert outcomes == [(number, True) for number in range(2, 2 + len(outcomes))]
    assert max(islands.gaps) < TIMEOUT, f"an exchange took {max(islands.gaps):.1f} s"
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "was silent" not in log
    assert len(log) < MEGABYTES


@pytest.mark.parametrize(
    "message",
    [{"kind": "beat"}, {"kind": "status"}, {"kind": "beat", "text": "y" * 900_000}],
    ids=["beat", "status", "long"],
)
def test_one_that_floods_and_reads_nothing_delays_nobody(tmp_path: Path, message: Message) -> None:
    with serving(tmp_path) as (address, pid):
        islands = Islands(address)
        before, ends = memory(pid), []
        with connect(address, COORDINATOR, Credentials.find(), limits=Limits(patience=5.0)) as there:
            there.send(templates(0)[0])
            flooding = threading.Thread(target=lambda: ends.append(flood(there, encode(message), 2.5)))
            flooding.start()
            flooding.join(15)
            met = len(islands.rounds)
            assert met > 3
            until(lambda: len(islands.rounds) > met, 20)
        islands.end()
        assert memory(pid) < before + 64 * MEGABYTES
    assert ends
    assert ends[0] > 0
    assert max(islands.gaps) < TIMEOUT
    assert all(committed for found in islands.rounds for _, committed in found)


def test_a_lone_surrogate_in_a_name_loses_no_message(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, _):
        islands = Islands(address)
        for number in range(20):
            head = json.dumps({**templates(number)[0], "name": "\ud800", "terms": TERMS}).encode()
            with connect(address, COORDINATOR, Credentials.find()) as there:
                there.send_encoded(HEADER.pack(b"DSCF", len(head), 0) + head)
                with pytest.raises(ConnectionError):
                    there.receive(5)
        islands.end()
    assert all(committed for found in islands.rounds for _, committed in found)


def test_many_silent_connections_cost_little(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, pid):
        islands = Islands(address)
        before, host, port = memory(pid), "127.0.0.1", int(address.rpartition(":")[2])
        silent = [socket.create_connection((host, port), timeout=5) for _ in range(500)]
        time.sleep(0.5)
        assert memory(pid) < before + 16 * MEGABYTES
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < 200
        islands.end()
        for one in silent:
            one.close()
    assert all(committed for found in islands.rounds for _, committed in found)
