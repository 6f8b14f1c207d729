"""Thousands of hostile messages to a supervisor, while an honest agent is answered in time and its job continues."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deepspeed_compress.launcher.messages import FROM_AGENTS, FROM_SUPERVISOR, SUPERVISOR
from deepspeed_compress.launcher.placement import JobOptions
from deepspeed_compress.launcher.supervisor import Supervisor
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.machine_server import MachineServer
from tests.support.coordinators import serving
from tests.support.hostile import COUNTS, Message, attack_authenticated, attack_unauthenticated
from tests.support.processes import MEGABYTE, resident_memory
from tests.support.transport import until

pytestmark = pytest.mark.sampled(3)

JOB = "the job of honest agents"
PATIENCE = 4.5
"""Maximum number of seconds for an answer. Agents end their ranks after five seconds without one."""


class Agent:
    """An honest agent that sends heartbeats in a thread. `seconds` are the times until each answer."""

    def __init__(self, address: str, name: str = "honest") -> None:
        self.messages: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self._connection = connect(address, SUPERVISOR, Credentials.find(), limits=Limits(patience=5.0))
        self.send("join", name=name, job=JOB, address="10.0.0.1", port=1)
        self._end = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._listen)]
        for thread in self._threads:
            thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        self._connection.send({"kind": kind, **fields})

    def received(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind]

    def end(self) -> None:
        self._end.set()
        self._connection.end()
        for thread in self._threads:
            thread.join(60)
        self._connection.close()

    def _beat(self) -> None:
        while not self._end.wait(0.1):
            begun, answered = time.monotonic(), len(self.received("beat"))
            self.send("beat", start=len(self.received("start")), silent=0.1, steps=3)
            until(lambda answered=answered: self._end.is_set() or len(self.received("beat")) > answered, PATIENCE)
            self.seconds.append(time.monotonic() - begun)

    def _listen(self) -> None:
        while not self._end.is_set():
            try:
                message = self._connection.receive(1.0)
            except OSError:
                return
            if message is not None:
                FROM_SUPERVISOR.read(message)
                self.messages.append(message)


@contextmanager
def supervised(log: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Run a supervisor for one host with two ranks, and yield its address."""
    machine = Supervisor(JobOptions(JOB, 1, 2, 3, 60.0, 60.0), lambda ranks: "", log)
    server = MachineServer(machine, None, "127.0.0.1", 0, log, Credentials.find())
    with serving(server):
        yield f"127.0.0.1:{server.port}"


def templates(number: int) -> list[Message]:
    """Return messages of a member of the job if `number` is odd, otherwise of an agent of another job."""
    job = JOB if number % 2 else "another job"
    join = {"kind": "join", "name": f"hostile{number}", "job": job, "address": "10.0.0.9", "port": 9}
    failed = {"kind": "failed", "start": 1, "rank": 0, "how": "was lost", "permanent": False, "steps": 9}
    return [
        join,
        {"kind": "beat", "start": 1, "silent": 0.5, "steps": 1},
        failed,
        {"kind": "done", "start": 1},
        {"kind": "stopped", "start": 1, "steps": 1, "port": 2},
    ]


def finish(agent: Agent) -> None:
    """Let a rank fail, and check that the supervisor restarts the job and ends it successfully."""
    agent.send("failed", start=1, rank=1, how="has ended", permanent=False, steps=3)
    until(lambda: bool(agent.received("stop")))
    agent.send("stopped", start=1, steps=3, port=5)
    until(lambda: len(agent.received("start")) == 2)
    started = agent.received("start")[1]
    assert (started["hosts"], started["port"]) == (["10.0.0.1"], 5)
    agent.send("done", start=2)
    until(lambda: bool(agent.received("over")))
    assert agent.received("over")[0] == {"kind": "over", "code": 0, "why": ""}


@COUNTS
def test_hostile_messages_do_not_disturb_an_honest_agent(count: int) -> None:
    log: list[str] = []
    with supervised(log.append) as address:
        agent = Agent(address)
        until(lambda: bool(agent.received("start")))
        before = resident_memory(os.getpid())
        assert attack_unauthenticated(address, count // 2, seed=3) > count // 4
        sent = attack_authenticated(address, SUPERVISOR, Credentials.find(), templates, count // 2, seed=4)
        assert sent >= count // 2
        assert resident_memory(os.getpid()) < before + 64 * MEGABYTE
        assert not agent.received("stop")
        until(lambda: bool(agent.seconds))
        finish(agent)
        agent.end()
    assert max(agent.seconds) < PATIENCE
    assert len(log) < 100, "a flood fills the log"


def joined(address: str, number: int) -> Connection:
    there = connect(address, SUPERVISOR, Credentials.find(), limits=Limits(patience=5.0))
    there.send(templates(number)[0])
    return there


@pytest.mark.parametrize("number", [2.0, 15.0, True, "15", 9, None])
def test_a_signal_that_no_user_sends_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match="number is"):
        FROM_AGENTS.read({"kind": "end", "number": number})
    with pytest.raises(ValueError, match="number is"):
        FROM_SUPERVISOR.read({"kind": "pass", "start": 1, "number": number})


def test_the_name_of_the_job_is_not_revealed_to_other_agents() -> None:
    with supervised() as address, joined(address, 2) as there:
        answer = there.receive(60)
        assert answer == {"kind": "refused", "why": "another job uses this address"}
        there.send({"kind": "status"})
        assert JOB not in json.dumps(there.receive(60))
