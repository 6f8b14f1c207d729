"""The process of a parameter server: connections of ranks, calls put together of their parts, and what outlives it."""

import contextlib
import select
import socket
import socketserver
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.services.parameter_server.frames import Buffer, Head, receive, send
from deepspeed_compress.services.parameter_server.ledger import Ledger
from deepspeed_compress.services.parameter_server.store import Records, Store, as_json

__all__ = ["Server", "keep_alive"]

Answer = tuple[Head, Buffer]
LOOK = 0.5
"""Seconds between looks at whether somebody who waits is still there."""
CHECK = 10
"""Seconds of silence after which the kernel asks whether the other side is there."""
LONGEST_SILENCE = 2**15 - 1
"""Seconds: Linux takes no more."""
SPARE = 1 << 20
"""Bytes that the log may have in any case."""


@dataclass
class _Call:
    """Number `number` of an island. `parts`: what its ranks have said, by place. `answers`: once it is carried out."""

    number: int
    parts: dict[int, tuple[Head, Buffer]] = field(default_factory=dict)
    answers: Mapping[int, Answer] | None = None


class Server:
    """Serves one `Store` at `host`:`port`, 0 for a free one. `told` gets a line for people now and then."""

    def __init__(
        self, ledger: Ledger | None, host: str, port: int, told: Callable[[str], None] = lambda text: None
    ) -> None:
        self._ledger, self._told = ledger, told
        self._store = _restored(ledger)
        self._change = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._living: dict[int, object] = {}
        self._tcp = _Tcp((host, port), _Connection)
        self._tcp.owner = self
        self.port = int(self._tcp.server_address[1])

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Until `stop`. `ready` is called when islands can connect."""
        ready()
        try:
            self._tcp.serve_forever(0.1)
        finally:
            self._tcp.server_close()
            self._tcp.hang_up()
            with self._change:
                self._save()
                if self._ledger is not None:
                    self._ledger.close()
                    self._ledger = None

    def stop(self) -> None:
        """From any thread but that of `run`, and from a signal."""
        threading.Thread(target=self._tcp.shutdown, daemon=True).start()

    def hear(self, head: Head, body: Buffer, connection: "_Connection") -> Answer:
        """The answer to what a rank has said. ConnectionError where nobody waits for it any more."""
        told = _SIMPLE.get(head["kind"])
        if told is not None:
            with self._change:
                return told(self, head, connection), b""
        if head["run"] != self._store.records.run:
            return _refused(f"it is of run {self._store.records.run}, and the island of run {head['run']}"), b""
        return self._part(head, body, connection)

    def gone(self, connection: object) -> None:
        """It has ended: whose it was is dead until it calls again."""
        with self._change:
            for number in [number for number, one in self._living.items() if one is connection]:
                del self._living[number]
                self._store.forget(number)
                # Ranks that wait for the others in a call say it again.
                self._calls.pop(number, None)

    def _enter(self, head: Head, connection: "_Connection") -> Head:
        problem = self._store.problem(head["terms"])
        if problem:
            return _refused(problem)
        if self._ledger is not None:
            self._ledger.append([dict(head)], [b""])
        number = self._store.enter(head["terms"])
        self._living[number] = connection
        self._told(f"island {number} has come")
        return {"kind": "welcome", "run": self._store.records.run, "number": number}

    def _resume(self, head: Head, connection: "_Connection") -> Head:
        """Of one that has loaded a checkpoint: whether it saved that, and nothing has come of it since."""
        records, saved = self._store.records, head["saved"]
        island = records.islands.get(saved["number"])
        known = saved["run"] == records.run and island is not None and saved["number"] not in self._living
        if known and island is not None and island.call == saved.get("call") and island.version == saved["version"]:
            self._living[saved["number"]] = connection
            self._living.pop(head["number"], None)
            return {"kind": "resumed"}
        return {"kind": "newest" if records.pushes else "untrained"}

    def _status(self, head: Head, connection: "_Connection") -> Head:
        records = self._store.records
        there = [
            {"number": number, "version": one.version, "weight": one.weight}
            for number, one in sorted(records.islands.items())
            if number in self._living
        ]
        about = {"run": records.run, "version": records.version, "samples": records.samples, "islands": there}
        return {"kind": "status", **about}

    def _part(self, head: Head, body: Buffer, connection: "_Connection") -> Answer:
        number, place = int(head["number"]), int(head["place"])
        with self._change:
            island = self._store.records.islands.get(number)
            if island is None:
                return _refused(f"it does not know island {number}"), b""
            if place == 0:
                self._living[number] = connection
            call = self._calls.get(number)
            if call is None or call.number != head["call"]:
                if island.call >= head["call"]:
                    return self._store.repeated(number, place)
                call = self._calls[number] = _Call(head["call"])
                self._change.notify_all()
            if call.answers is None:
                self._store.check(head, body)
                if any(other["kind"] != head["kind"] for other, _ in call.parts.values()):
                    raise ValueError("ranks of an island make different calls")
                call.parts[place] = (head, body)
                self._carry_out(number, call)
            self._wait(number, call, connection)
            assert call.answers is not None, "waited for"
            return call.answers[place]

    def _wait(self, number: int, call: _Call, connection: "_Connection") -> None:
        """Until the other ranks of the island have said their parts."""
        while call.answers is None:
            self._change.wait(LOOK)
            if self._calls.get(number) is not call or connection.ended():
                raise ConnectionError("the island has gone on, or is gone")

    def _carry_out(self, number: int, call: _Call) -> None:
        if len(call.parts) < (self._store.records.terms or {})["ranks"]:
            return
        heads, bodies = zip(*(call.parts[place] for place in sorted(call.parts)), strict=True)
        if self._ledger is not None:
            self._ledger.append(heads, bodies)
        # It has been done from here on: where the answer fails, it is not done again.
        del self._calls[number]
        kind = self._store.apply(heads, bodies)
        call.answers = {place: self._store.answer(number, place, kind, call.number) for place in call.parts}
        self._calls[number] = call
        call.parts.clear()
        self._tell(number, kind)
        self._change.notify_all()
        if self._ledger is not None and self._ledger.logged > self._large:
            self._save()

    def _tell(self, number: int, kind: str) -> None:
        records = self._store.records
        weight = records.islands[number].weight
        self._told(f"island {number}: {kind}, weight {weight:.2f}, version {records.version}")

    @property
    def _large(self) -> int:
        return SPARE + 2 * sum(one.nbytes for one in self._store.tensors().values())

    def _save(self) -> None:
        if self._ledger is not None:
            self._ledger.write(as_json(self._store.records), self._store.tensors())


_SIMPLE: Mapping[str, Callable[[Server, Head, "_Connection"], Head]] = {
    "enter": Server._enter,
    "resume": Server._resume,
    "status": Server._status,
    "join": lambda server, head, connection: _refused(
        'it is a parameter server, and this island meets in rounds; write "parameter_server": {}, or name a coordinator'
    ),
}


def _refused(why: str) -> Head:
    return {"kind": "refused", "why": why}


def _restored(ledger: Ledger | None) -> Store:
    """As it was left; the ledger is ready for more."""
    found = None if ledger is None else ledger.read()
    fresh = Records(uuid.uuid4().hex[:12])
    store = Store(fresh) if found is None else Store(Records.of(found[0]), found[1])
    if ledger is not None:
        for heads, bodies in ledger.entries() if found is not None else ():
            if heads[0]["kind"] == "enter":
                store.enter(heads[0]["terms"])
            else:
                store.apply(heads, bodies)
        ledger.write(as_json(store.records), store.tensors())
    return store


def keep_alive(there: socket.socket, silence: float) -> None:
    """The kernel ends a connection whose other side has not been there for about three times `silence` seconds."""
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            there.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), min(max(1, round(silence)), LONGEST_SILENCE))
    if hasattr(socket, "TCP_KEEPCNT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(max(1, round(3000 * silence)), 2**31 - 1))


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    owner: Server

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.StreamRequestHandler):
    """Of one rank, until it ends. What is no call ends it."""

    server: _Tcp
    wbufsize = 1 << 16

    def handle(self) -> None:
        keep_alive(self.request, CHECK)
        try:
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
                while (found := receive(self.rfile)) is not None:
                    send(self.wfile, *self.server.owner.hear(*found, self))
        finally:
            self.server.owner.gone(self)

    def finish(self) -> None:
        # Who asked may be gone.
        with contextlib.suppress(OSError):
            super().finish()

    def ended(self) -> bool:
        """Whether the other side has hung up, while it waits for an answer."""
        ready, _, _ = select.select([self.request], [], [], 0)
        try:
            return bool(ready) and not self.request.recv(1, socket.MSG_PEEK)
        except OSError:
            return True
