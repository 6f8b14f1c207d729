"""Parameter server without sockets: it assembles calls from the parts of ranks, logs them, and answers."""

import secrets
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.local_sgd.parameter_server.calls import Part, Sender, integer, read_part, shown
from deepspeed_compress.local_sgd.parameter_server.client import LARGEST_BODY
from deepspeed_compress.local_sgd.parameter_server.membership import DEFAULT_ROOM, Membership, Room, check_holder
from deepspeed_compress.local_sgd.parameter_server.push_log import Entry, PushLog
from deepspeed_compress.local_sgd.parameter_server.records import Records
from deepspeed_compress.local_sgd.parameter_server.store import Change, Store
from deepspeed_compress.transport.connection import Buffer, Connection
from deepspeed_compress.transport.frames import Head

Answer = tuple[Head, Buffer]
CHECK_INTERVAL = 0.5
"""Seconds between checks whether a rank that waits for others is still connected."""
LEAST_LOG = 1 << 20
"""Bytes that the log may always have."""


@dataclass
class _Call:
    """Call that waits for the parts of all ranks, or that was carried out, with `answers` by place."""

    first: Part
    parts: dict[int, tuple[Part, Head, Buffer]] = field(default_factory=dict)
    answers: dict[int, Answer] | None = None


class Service:
    """Server of one `Store`.

    Args:
        log: persistent log of the store; None keeps it in memory only.
        report: receives log lines.
        room: limit on the number of islands.

    Raises:
        StateError: if the files of `log` are damaged.
    """

    def __init__(self, log: PushLog | None, report: Callable[[str], None], room: Room = DEFAULT_ROOM) -> None:
        self._log, self._report = log, report
        self.store = _restore(log, report)
        self._change = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._members = Membership(room)
        self._failed_at = 0
        """Bytes of the log when the state could not be written; 0 after success."""

    def handle(self, head: Head, body: Buffer, caller: Connection) -> Answer:
        """Return the answer to a message of a rank. An invalid message is refused, and changes nothing.

        Raises:
            ConnectionError: if no rank waits for the answer anymore.
        """
        simple = _SIMPLE.get(head["kind"])
        try:
            if simple is not None:
                with self._change:
                    return simple(self, head, caller), b""
            return self._part(head, body, caller)
        except ValueError as error:
            return _refused(f"{error}"), b""

    @property
    def largest_body(self) -> int:
        """Return the largest size in bytes of a body.

        Payloads may exceed tiny vectors; weights are bounded once there are any.
        """
        places = self.store.places
        return max(LEAST_LOG + 4 * one.anchor.numel() for one in places) if places else LARGEST_BODY

    def refusal(self, head: Head, size: int) -> Answer | None:
        """Return the refusal of a message whose body of `size` bytes was not read yet; None if it may be read."""
        try:
            if head["kind"] in _SIMPLE:
                integer(size, "the body", most=0)
            elif size:
                part = read_part(head, size)
                with self._change:
                    check_holder(self.store.records, part.number, part.token)
                    self.store.check(part)
        except ValueError as error:
            return _refused(f"{error}"), b""
        return None

    def disconnect(self, caller: Connection) -> None:
        """Record that a connection has ended. Its island gets the whole anchor when it calls again."""
        with self._change:
            for number in self._members.lose(caller):
                self.store.forget(number)

    def close(self) -> None:
        """Write everything, and release the files for another server."""
        with self._change:
            self._save()
            if self._log is not None:
                self._log.close()
                self._log = None

    def _carry_out(self, heads: list[Head], bodies: list[Buffer]) -> Change:
        """Carry out an entry. It is logged if, and only if, it cannot fail any more."""
        change = self.store.prepare(heads, bodies)
        if self._log is not None:
            self._log.append(heads, bodies)
        self.store.commit(change)
        if self._log is not None and self._log.logged > max(self._largest_log, 2 * self._failed_at):
            self._save()
        return change

    def _enter(self, head: Head, caller: Connection) -> Head:
        problem = self.store.problem(head.get("terms"))
        if problem:
            return _refused(problem)
        token, number = secrets.token_hex(16), self.store.records.next_number
        entry = {
            "kind": "enter",
            "terms": head["terms"],
            "token": token,
            "forgotten": self._members.make_room(self.store.records),
        }
        self._carry_out([entry], [b""])
        for forgotten in entry["forgotten"]:
            self._members.forget(forgotten)
            self._calls.pop(forgotten, None)
        self._members.record_call(number, caller)
        self._report(f"island {number} joined")
        return {"kind": "welcome", "run": self.store.records.run, "number": number, "token": token}

    def _resume(self, head: Head, caller: Connection) -> Head:
        """Answer an island that has loaded a checkpoint.

        It may resume if it saved that checkpoint and has not called since. A former process of the island is refused
        from then on, because it does not have the new token.
        """
        records, saved = self.store.records, head.get("saved")
        if not isinstance(saved, Mapping):
            raise ValueError(f"saved is {shown(saved)} (allowed: an object)")
        number = self._saved_by(saved)
        if number is None:
            return {"kind": "newest" if records.pushes else "untrained"}
        token = secrets.token_hex(16)
        self._carry_out([{"kind": "resume", "number": number, "token": token}], [b""])
        self._members.record_call(number, caller)
        if self._is_holder(head) and head["number"] != number:
            # The number that its process got when it started.
            self._leave(head, caller)
        return {"kind": "resumed", "token": token}

    def _saved_by(self, saved: Mapping[str, Any]) -> int | None:
        """Return the island that saved `saved`; None if it is connected, or has called since."""
        number, records = saved.get("number"), self.store.records
        island = records.islands.get(number) if type(number) is int else None
        if island is None or self._members.is_connected(int(saved["number"])) or saved.get("run") != records.run:
            return None
        same = (island.call, island.version) == (saved.get("call"), saved.get("version"))
        return number if same else None

    def _leave(self, head: Head, caller: Connection) -> Head:
        """Answer an island that leaves: it may be forgotten when room is needed."""
        sender = Sender.read(head)
        number = sender.number
        check_holder(self.store.records, number, sender.token)
        self._carry_out([{"kind": "leave", "number": number}], [b""])
        self._members.disconnect(number)
        self._calls.pop(number, None)
        self._change.notify_all()
        self._report(f"island {number} left")
        return {"kind": "left"}

    def _status(self, head: Head, caller: Connection) -> Head:
        records = self.store.records
        there = [
            {"number": number, "version": one.version, "weight": one.weight}
            for number, one in sorted(records.islands.items())
            if self._members.is_connected(number)
        ]
        about = {"run": records.run, "version": records.version, "samples": records.samples, "islands": there}
        return {"kind": "status", **about}

    def _is_holder(self, head: Head) -> bool:
        """Return True if `head` is from the process that entered or resumed its island last."""
        try:
            sender = Sender.read(head)
            check_holder(self.store.records, sender.number, sender.token)
        except ValueError:
            return False
        return True

    def _part(self, head: Head, body: Buffer, caller: Connection) -> Answer:
        run = self.store.records.run
        if head.get("run") != run:
            return _refused(f"the server holds run {run}, and the island belongs to run {shown(head.get('run'))}"), b""
        part = read_part(head, len(body))
        with self._change:
            check_holder(self.store.records, part.number, part.token)
            self.store.check(part)
            if part.place == 0:
                self._members.record_call(part.number, caller)
            call = self._calls.get(part.number)
            if call is None or call.first.call != part.call:
                if self.store.records.islands[part.number].call >= part.call:
                    return self.store.repeated(part.number, part.place)
                call = _Call(part)
            if call.answers is None:
                self._add(call, part, head, body)
            self._wait(call, part, caller)
            # The part may arrive once more after its connection was lost; it is then answered as after a restart.
            found = (call.answers or {}).pop(part.place, None)
            return self.store.repeated(part.number, part.place) if found is None else found

    def _add(self, call: _Call, part: Part, head: Head, body: Buffer) -> None:
        """Add `part` to `call`, and carry the call out if it is complete."""
        if part.common != call.first.common:
            raise ValueError(f"ranks of an island make different calls: {call.first.common} and {part.common}")
        self._calls[part.number] = call
        call.parts[part.place] = part, head, body
        self._change.notify_all()
        if len(call.parts) == self.store.terms.ranks:
            self._complete(part.number, call)

    def _complete(self, number: int, call: _Call) -> None:
        parts = [call.parts[place] for place in sorted(call.parts)]
        call.parts.clear()
        # Whatever fails from here on, the call is not carried out a second time.
        del self._calls[number]
        self._change.notify_all()
        try:
            change = self._carry_out([head for _, head, _ in parts], [body for _, _, body in parts])
        except ValueError as error:
            call.answers = {part.place: (_refused(f"{error}"), b"") for part, _, _ in parts}
            return
        call.answers = {part.place: self._answer(part, change) for part, _, _ in parts}
        self._calls[number] = call
        self._report_change(number, change)

    def _answer(self, part: Part, change: Change) -> Answer:
        return self.store.answer(part.number, part.place, change.kind, part.call, change.reason)

    def _wait(self, call: _Call, part: Part, caller: Connection) -> None:
        """Wait until the other ranks of the island have sent their parts."""
        while call.answers is None:
            self._change.wait(CHECK_INTERVAL)
            lost = self._calls.get(part.number) is not call
            if call.answers is None and (lost or caller.has_hung_up()):
                self._withdraw(call, part)
                raise ConnectionError("the island has made another call, or has disconnected")

    def _withdraw(self, call: _Call, part: Part) -> None:
        """Remove the part of a rank that no longer waits for an answer, unless the rank has sent it again."""
        if part.place in call.parts and call.parts[part.place][0] is part:
            del call.parts[part.place]
        if not call.parts and self._calls.get(part.number) is call:
            del self._calls[part.number]

    def _report_change(self, number: int, change: Change) -> None:
        weight, why = change.records.islands[number].weight, f" ({change.reason})" if change.reason else ""
        self._report(f"island {number}: {change.kind}{why}, weight {weight:.2f}, version {change.records.version}")

    @property
    def _largest_log(self) -> int:
        return LEAST_LOG + 2 * sum(one.nbytes for one in self.store.tensors().values())

    def _save(self) -> None:
        """Write the state, and begin a new log. If that fails, the log goes on, and no call is lost."""
        if self._log is None:
            return
        try:
            self._log.write(self.store)
            self._failed_at = 0
        except OSError as error:
            self._failed_at = self._log.logged
            self._report(f"the log grows, because the state cannot be written ({error})")


_SIMPLE: Mapping[str, Callable[[Service, Head, Connection], Head]] = {
    "enter": Service._enter,
    "resume": Service._resume,
    "leave": Service._leave,
    "status": Service._status,
}


def _refused(why: str) -> Head:
    return {"kind": "refused", "why": why}


def _restore(log: PushLog | None, report: Callable[[str], None]) -> Store:
    """Return the store as it was left, with a new log."""
    found = None if log is None else log.read()
    store = Store(Records(uuid.uuid4().hex[:12])) if found is None else found
    if log is not None:
        for number, entry in enumerate(log.entries() if found is not None else (), 1):
            problem = _replay(store, entry)
            if problem:
                report(f"entry {number} of the log is skipped: {problem}")
        log.write(store)
    return store


def _replay(store: Store, entry: Entry | ValueError) -> str:
    """Carry out an entry of the log. Return why it cannot be carried out; "" on success."""
    try:
        if isinstance(entry, ValueError):
            raise entry
        store.commit(store.prepare(*entry))
    except ValueError as error:
        return f"{error}"
    return ""
