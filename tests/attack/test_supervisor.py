"""Ten thousand hostile messages for a supervisor, while an honest agent is answered in time and its job goes on."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.launcher.messages import FROM_AGENTS, FROM_SUPERVISOR, SUPERVISOR
from deepspeed_compress.launcher.supervisor import JobOptions, Supervisor
from deepspeed_compress.local_sgd.coordinator.server import Server, Service
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.fields import check_message
from deepspeed_compress.transport.frames import Limits, encode
from tests.support.coordinators import serving
from tests.support.hostile import Message, attack_authenticated, attack_unauthenticated, flood
from tests.support.transport import until

COUNT = 10_000
JOB = "the job of honest agents"
PATIENCE = 4.5
"""Seconds for an answer; agents end their ranks after five."""
MEGABYTE = 1 << 20


class Agent:
    """An honest agent, which beats in a thread of its own. `gaps`: seconds that each answer took."""

    def __init__(self, address: str, name: str = "honest", slots: int = 2) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gaps: list[float] = []
        self._connection = connect(address, SUPERVISOR, Credentials.find(), limits=Limits(patience=5.0))
        self.say("join", name=name, job=JOB, address="10.0.0.1", slots=list(range(slots)), port=1)
        self._end = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._listen)]
        for thread in self._threads:
            thread.start()

    def say(self, kind: str, **fields: Any) -> None:
        self._connection.send({"kind": kind, **fields})

    def heard(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.messages if one["kind"] == kind]

    def end(self) -> None:
        self._end.set()
        self._connection.end()
        for thread in self._threads:
            thread.join(5)
        self._connection.close()

    def _beat(self) -> None:
        while not self._end.wait(0.1):
            begun, answered = time.monotonic(), len(self.heard("beat"))
            self.say("beat", start=len(self.heard("start")), silent=0.1, steps=3)
            until(lambda answered=answered: self._end.is_set() or len(self.heard("beat")) > answered, PATIENCE)
            self.gaps.append(time.monotonic() - begun)

    def _listen(self) -> None:
        while not self._end.is_set():
            try:
                message = self._connection.receive(1.0)
            except OSError:
                return
            if message is not None:
                check_message(message, FROM_SUPERVISOR)
                self.messages.append(message)


@contextmanager
def supervised(tell: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """The address of a supervisor for one host of two ranks."""
    machine = Supervisor(JobOptions(JOB, 1, 2, 3, 60.0, 60.0), lambda ranks: "", tell)
    service = Service(SUPERVISOR, "agent", partial(check_message, table=FROM_AGENTS))
    server = Server(service, machine, None, "127.0.0.1", 0, tell, Credentials.find())
    with serving(server):
        yield f"127.0.0.1:{server.port}"


def templates(number: int) -> list[Message]:
    """Messages of a member of the job if `number` is odd, else of an agent of another job."""
    job = JOB if number % 2 else "another job"
    join = {"kind": "join", "name": f"hostile{number}", "job": job, "address": "10.0.0.9", "slots": [0], "port": 9}
    failed = {"kind": "failed", "start": 1, "rank": 0, "slot": 0, "how": "was lost", "code": None, "steps": 9}
    return [
        join,
        {"kind": "beat", "start": 1, "silent": 0.5, "steps": 1},
        failed,
        {"kind": "done", "start": 1},
        {"kind": "stopped", "start": 1, "steps": 1, "port": 2},
    ]


def memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def finish(agent: Agent) -> None:
    """A rank fails, the job starts again, and ends well: the supervisor still decides as ever."""
    agent.say("failed", start=1, rank=1, slot=1, how="has ended", code=1, steps=3)
    until(lambda: bool(agent.heard("stop")))
    agent.say("stopped", start=1, steps=3, port=5)
    until(lambda: len(agent.heard("start")) == 2)
    started = agent.heard("start")[1]
    assert (started["hosts"], started["slots"], started["port"]) == (["10.0.0.1"], [0, 1], 5)
    agent.say("done", start=2)
    until(lambda: bool(agent.heard("over")))
    assert agent.heard("over")[0] == {"kind": "over", "code": 0, "why": ""}


def test_ten_thousand_hostile_messages_disturb_nobody() -> None:
    told: list[str] = []
    with supervised(told.append) as address:
        agent = Agent(address)
        until(lambda: bool(agent.heard("start")))
        before = memory()
        assert attack_unauthenticated(address, COUNT // 2, seed=3) > COUNT // 4
        sent = attack_authenticated(address, SUPERVISOR, Credentials.find(), templates, COUNT // 2, seed=4)
        assert sent >= COUNT // 2
        assert memory() < before + 64 * MEGABYTE
        assert not agent.heard("stop")
        finish(agent)
        agent.end()
    assert max(agent.gaps) < PATIENCE
    assert len(told) < 100, "a flood does not fill the log"


@pytest.mark.parametrize("text", ["", "y" * 900_000], ids=["short", "long"])
def test_one_that_floods_and_reads_nothing_delays_nobody(text: str) -> None:
    with supervised() as address:
        agent = Agent(address)
        until(lambda: bool(agent.heard("start")))
        with joined(address, 1) as there:
            before = memory()
            assert flood(there, encode({**templates(1)[1], "text": text}), 2.0) > 0
            assert memory() < before + 64 * MEGABYTE
        finish(agent)
        agent.end()
    assert max(agent.gaps) < PATIENCE


def joined(address: str, number: int) -> Connection:
    there = connect(address, SUPERVISOR, Credentials.find(), limits=Limits(patience=5.0))
    there.send(templates(number)[0])
    return there


def listen(there: Connection) -> None:
    while there.receive(5) is not None:
        continue


def test_the_name_of_the_job_is_told_to_no_stranger() -> None:
    with supervised() as address, joined(address, 2) as there:
        answer = there.receive(5)
        assert answer == {"kind": "refused", "why": "another job uses this address"}
        there.send({"kind": "status"})
        assert JOB not in json.dumps(there.receive(5))


@pytest.mark.parametrize(
    "changed",
    [
        {"silent": "soon"},
        {"silent": [1]},
        {"silent": -1},
        {"steps": None},
        {"steps": "3"},
        {"start": True},
        {"kind": "jion"},
    ],
    ids=str,
)
def test_a_malformed_heartbeat_ends_its_own_connection_and_no_more(changed: dict[str, Any]) -> None:
    with supervised() as address:
        agent = Agent(address)
        until(lambda: bool(agent.heard("start")))
        with joined(address, 1) as there:
            there.send({**templates(1)[1], **changed})
            with pytest.raises(ConnectionError):
                listen(there)
        heard = len(agent.heard("beat"))
        until(lambda: len(agent.heard("beat")) > heard + 5)
        finish(agent)
        agent.end()
