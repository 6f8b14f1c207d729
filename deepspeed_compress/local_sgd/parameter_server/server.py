"""Parameter server at a port: it assembles calls from the parts of ranks, carries them out, and answers.

The state is on disk before an island is told that it entered or resumed. Other calls are answered at once and saved
later: each answer says which calls are saved, and an island keeps the others. After a crash, the server answers the
next call of an island by `again` and the number of the first call that it misses.
"""

import hmac
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.local_sgd.parameter_server.messages import (
    FROM_ISLANDS,
    PARAMETER_SERVER,
    Enter,
    FromIsland,
    Part,
    Resume,
    Saved,
    Seed,
)
from deepspeed_compress.local_sgd.parameter_server.places import Place
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.local_sgd.parameter_server.store import Change, Records, Store, tensors_of
from deepspeed_compress.transport.connection import LARGE_HEAD, Buffer, Connection, Head, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.messages import Fields
from deepspeed_compress.transport.server import RateLimitedLog, ignore
from deepspeed_compress.transport.server import Server as TransportServer

Answer = tuple[Head, Buffer]
MOST_ISLANDS = 1000
"""Most islands that are remembered. A forgotten island must enter as a new one."""
CHECK_INTERVAL = 0.5
"""Seconds between checks whether a rank that waits for others is still connected."""
SAVE_INTERVAL = 1.0
"""Least seconds between two snapshots of calls."""
SAVE_SHARE = 0.1
"""Largest share of the time that is spent on snapshots of calls."""
LARGEST_BODY = 1 << 36
"""Largest size in bytes of the weights of one rank, before there are any."""
_SLACK = 1 << 20
"""Bytes by which a payload may exceed its weights."""


@dataclass
class _Call:
    """Call that waits for the parts of all ranks, or that was carried out, with `answers` by place."""

    first: Part
    parts: dict[int, tuple[Part, Buffer]] = field(default_factory=dict)
    answers: dict[int, Answer] | None = None


class Service:
    """Server of one `Store`, without sockets.

    Args:
        file: file of the state; None keeps it in memory only.
        report: receives log lines.

    Raises:
        OSError: if `file` cannot be written.
        StateError: if it is damaged.
    """

    def __init__(self, file: Snapshot | None, report: Callable[[str], None]) -> None:
        self._file, self._report, self._notices = file, report, RateLimitedLog(report)
        found = None if file is None else file.read()
        self.store = Store(Records(run=uuid.uuid4().hex[:12])) if found is None else found
        self._saved, self._next_save = self.store.records, 0.0
        self._change = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._connected: dict[int, Connection] = {}
        """Connections of the first ranks of islands."""
        if found is None:
            self._save(self.store.records, self.store.places)

    def handle(self, head: Head, body: Buffer, caller: Connection) -> Answer:
        """Return the answer to a message of a rank. An invalid message is refused, and changes nothing.

        Raises:
            ConnectionError: if no rank waits for the answer anymore.
        """
        try:
            message = FROM_ISLANDS.read(head)
            with self._change:
                return _HANDLERS[head["kind"]](self, message, body, caller)
        except ValueError as error:
            return _refused(f"{error}")

    @property
    def largest_body(self) -> int:
        """Return the largest size in bytes of a body.

        Payloads may exceed tiny vectors; weights are bounded once there are any.
        """
        places = self.store.places
        return max(_SLACK + 4 * place.anchor.numel() for place in places) if places else LARGEST_BODY

    def disconnect(self, caller: Connection) -> None:
        """Record that a connection has ended. Its island gets the whole anchor when it calls again."""
        with self._change:
            for number in [number for number, one in self._connected.items() if one is caller]:
                del self._connected[number]
                self.store.forget(number)

    def close(self) -> None:
        """Save everything, and release the file for another server."""
        with self._change:
            self._save_calls()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _drop(self, number: int) -> None:
        """Drop what only an island needs that is still there."""
        self._connected.pop(number, None)
        self._calls.pop(number, None)
        self.store.forget(number)
        self._change.notify_all()

    # The state on disk.

    def _admit(self, change: Change) -> None:
        """Apply that an island enters or resumes, after saving it.

        Raises:
            OSError: if it cannot be saved. Nothing has changed then.
        """
        self._save(change.records, change.places)
        self.store.commit(change)

    def _save_calls(self) -> None:
        """Save the state, if that is possible."""
        try:
            self._save(self.store.records, self.store.places)
        except OSError as error:
            self._notices(f"islands keep their calls, because the state cannot be written ({error})")

    def _save(self, records: Records, places: Sequence[Place]) -> None:
        begun = time.monotonic()
        try:
            if self._file is not None:
                self._file.write(records, tensors_of(places))
            self._saved = records
        finally:
            now = time.monotonic()
            self._next_save = now + max(SAVE_INTERVAL, (now - begun) / SAVE_SHARE) if self._file is not None else now

    # Messages.

    def _enter(self, message: Enter, body: Buffer, caller: Connection) -> Answer:
        islands, token, number = self.store.records.islands, secrets.token_hex(16), self.store.records.next_number
        excess = max(0, len(islands) + 1 - MOST_ISLANDS)
        # The island that has called last is the last one.
        forgotten = [other for other in islands if other not in self._connected][:excess]
        if len(forgotten) < excess:
            raise ValueError(f"{len(islands)} islands are connected (allowed: {MOST_ISLANDS}); stop some of them")
        self._admit(self.store.enter(message.terms, token, forgotten))
        for other in forgotten:
            self._drop(other)
        self._connected[number] = caller
        self._report(f"island {number} joined")
        return {"kind": "welcome", "run": self.store.records.run, "number": number, "token": token}, b""

    def _resume(self, message: Resume, body: Buffer, caller: Connection) -> Answer:
        """Answer an island that has loaded a checkpoint.

        It may resume if it saved that checkpoint and has not called since. A former process of the island is refused
        from then on, because it does not have the new token.
        """
        saved = message.saved
        if not self._may_resume(saved):
            return {"kind": "newest" if self.store.records.pushes else "untrained"}, b""
        token = secrets.token_hex(16)
        self._admit(self.store.give_token(saved.number, token))
        # The island that its process was since it started is gone.
        self.disconnect(caller)
        self.store.forget(saved.number)
        self._connected[saved.number] = caller
        return {"kind": "resumed", "token": token}, b""

    def _may_resume(self, saved: Saved) -> bool:
        """Return True if the island that saved `saved` is not connected, and has not called since."""
        records = self.store.records
        island = records.islands.get(saved.number)
        same = island is not None and (island.call, island.version) == (saved.call, saved.version)
        return same and saved.run == records.run and saved.number not in self._connected

    def _leave(self, message: FromIsland, body: Buffer, caller: Connection) -> Answer:
        self._check_holder(message)
        self.store.commit(self.store.give_token(message.number, ""))
        self._drop(message.number)
        self._report(f"island {message.number} left")
        return {"kind": "left"}, b""

    def _status(self, message: Fields, body: Buffer, caller: Connection) -> Answer:
        records = self.store.records
        there = [
            {"number": number, "version": one.version, "weight": one.weight}
            for number, one in sorted(records.islands.items())
            if number in self._connected
        ]
        about = {"run": records.run, "version": records.version, "samples": records.samples, "islands": there}
        return {"kind": "status", **about}, b""

    def _check_holder(self, message: FromIsland) -> None:
        """Raise ValueError unless the sender is the process that entered or resumed its island last."""
        island = self.store.records.islands.get(message.number)
        if island is None:
            raise ValueError(f"island {message.number} is not known to this server")
        if not island.token or not hmac.compare_digest(message.token.encode(), island.token.encode()):
            raise ValueError(f"island {message.number} has left, or another process has entered or resumed it")

    # Calls of all ranks of an island.

    def _part(self, part: Part, body: Buffer, caller: Connection) -> Answer:
        run = self.store.records.run
        if part.run != run:
            raise ValueError(f"the server holds run {run}, and the island belongs to run {part.run}")
        self._check_holder(part)
        missing = max(self.store.records.islands[part.number].call + 1, part.oldest)
        if part.oldest and missing < part.call:
            return {"kind": "again", "call": missing}, b""
        self.store.check(part, len(body))
        if part.place == 0:
            self._connected[part.number] = caller
        answer, payload = self._answer_part(part, body, caller)
        if part.is_again:
            # The island does not read it, so it must not count as what the island holds.
            self.store.forget(part.number)
            payload = b""
        saved = self._saved.islands.get(part.number)
        return {**answer, "saved": 0 if saved is None else saved.call}, payload

    def _answer_part(self, part: Part, body: Buffer, caller: Connection) -> Answer:
        call = self._calls.get(part.number)
        if call is None or call.first.call != part.call:
            if self.store.records.islands[part.number].call >= part.call:
                return self.store.repeated(part.number, part.place)
            call = _Call(part)
        if call.answers is None:
            self._add(call, part, body)
        self._wait(call, caller)
        # The part may arrive once more after its connection was lost; it is then answered as after a restart.
        found = (call.answers or {}).pop(part.place, None)
        return self.store.repeated(part.number, part.place) if found is None else found

    def _add(self, call: _Call, part: Part, body: Buffer) -> None:
        """Add `part` to `call`, and carry the call out if it is complete."""
        if part.common != call.first.common:
            raise ValueError(f"ranks of an island make different calls: {call.first.common} and {part.common}")
        self._calls[part.number] = call
        call.parts[part.place] = part, body
        self._change.notify_all()
        if len(call.parts) == self.store.terms.ranks:
            self._complete(part.number, call)

    def _complete(self, number: int, call: _Call) -> None:
        parts, bodies = zip(*(call.parts[place] for place in sorted(call.parts)), strict=True)
        call.parts.clear()
        # Whatever fails from here on, the call is not carried out a second time.
        del self._calls[number]
        self._change.notify_all()
        try:
            change = self.store.call(parts, bodies)
        except ValueError as error:
            call.answers = {part.place: _refused(f"{error}") for part in parts}
            return
        self.store.commit(change)
        # Islands do not keep a seed for long, because it is as large as the model.
        if isinstance(call.first, Seed) or time.monotonic() >= self._next_save:
            self._save_calls()
        call.answers = {
            part.place: self.store.answer(number, part.place, change.kind, part.call, change.reason) for part in parts
        }
        self._calls[number] = call
        self._report_change(number, change)

    def _wait(self, call: _Call, caller: Connection) -> None:
        """Wait until the other ranks of the island have sent their parts. If one is lost, all send theirs again."""
        number = call.first.number
        while call.answers is None:
            self._change.wait(CHECK_INTERVAL)
            if call.answers is None and (self._calls.get(number) is not call or caller.has_hung_up()):
                if self._calls.get(number) is call:
                    del self._calls[number]
                    self._change.notify_all()
                raise ConnectionError("the island has made another call, or has disconnected")

    def _report_change(self, number: int, change: Change) -> None:
        weight, why = change.records.islands[number].weight, f" ({change.reason})" if change.reason else ""
        self._report(f"island {number}: {change.kind}{why}, weight {weight:.2f}, version {change.records.version}")


_HANDLERS: Mapping[str, Callable[[Service, Any, Buffer, Connection], Answer]] = {
    "enter": Service._enter,
    "resume": Service._resume,
    "leave": Service._leave,
    "status": Service._status,
    **dict.fromkeys(("fresh", "seed", "push"), Service._part),
}


def _refused(why: str) -> Answer:
    return {"kind": "refused", "why": why}, b""


class Server:
    """Server of a `Service` at `host`:`port`; port 0 selects a free one.

    Args:
        file: file of the state; None keeps it in memory only.
        host: address to listen at.
        port: port to listen at.
        report: receives log lines.

    Raises:
        ConfigError: if there are no credentials.
        OSError: if the address is not available.
        StateError: if `file` is damaged.
    """

    def __init__(self, file: Snapshot | None, host: str, port: int, report: Callable[[str], None] = ignore) -> None:
        # Heads hold the names and shapes of all parameters; bodies are bounded by `Service.largest_body`.
        limits, credentials = Limits(head=LARGE_HEAD), Credentials.find()
        self._server = TransportServer(PARAMETER_SERVER, self._serve, host, port, credentials, limits, log=report)
        self.port = self._server.port
        try:
            self.service = Service(file, report)
        except BaseException:
            self._server.close()
            raise

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `ready` is called when islands can connect."""
        try:
            self._server.run(ready)
        finally:
            self.service.close()

    def stop(self) -> None:
        """End `run`. It may be called from any thread or signal handler, and does not block."""
        self._server.stop()

    def _serve(self, connection: Connection) -> None:
        """Answer one rank until its connection ends."""
        try:
            while (head := connection.receive(body=self.service.largest_body)) is not None:
                connection.send(*self.service.handle(head, connection.read_body(), connection))
        finally:
            self.service.disconnect(connection)
