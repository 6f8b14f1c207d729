"""Parameter server without sockets: it assembles calls from the parts of ranks, carries them out, and answers.

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

from deepspeed_compress.local_sgd.parameter_server.calls import Part, Sender, integer, read_part
from deepspeed_compress.local_sgd.parameter_server.client import LARGEST_BODY
from deepspeed_compress.local_sgd.parameter_server.places import Place
from deepspeed_compress.local_sgd.parameter_server.records import Records
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.local_sgd.parameter_server.store import Change, Store, tensors_of
from deepspeed_compress.transport.connection import Buffer, Connection
from deepspeed_compress.transport.frames import Head
from deepspeed_compress.transport.messages import shown
from deepspeed_compress.transport.rate_limited_log import RateLimitedLog

Answer = tuple[Head, Buffer]
CHECK_INTERVAL = 0.5
"""Seconds between checks whether a rank that waits for others is still connected."""
SAVE_INTERVAL = 1.0
"""Least seconds between two snapshots of calls."""
SAVE_SHARE = 0.1
"""Largest share of the time that is spent on snapshots of calls."""
_SLACK = 1 << 20
"""Bytes by which a payload may exceed its weights."""


@dataclass(frozen=True)
class Room:
    """Limit on the number of remembered islands. A forgotten island must enter as a new one.

    Attributes:
        islands: Largest number of islands.
        quiet: Seconds of silence after which an island may be forgotten even if it has not left.
    """

    islands: int = 1000
    quiet: float = 3600.0


DEFAULT_ROOM = Room()


class Membership:
    """Signs of life of islands. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._connected: dict[int, Connection] = {}
        self._heard: dict[int, float] = {}
        self._begun = time.monotonic()

    def record_call(self, number: int, caller: Connection) -> None:
        """Record a call of island `number`."""
        self._connected[number], self._heard[number] = caller, time.monotonic()

    def is_connected(self, number: int) -> bool:
        """Return True if the first rank of an island is connected."""
        return number in self._connected

    def lose(self, caller: Connection) -> list[int]:
        """Record that a connection has ended. Return the islands that it belonged to, which may call again."""
        found = [number for number, one in self._connected.items() if one is caller]
        for number in found:
            self.disconnect(number)
        return found

    def disconnect(self, number: int) -> None:
        """Record that an island has disconnected."""
        self._connected.pop(number, None)
        self._heard[number] = time.monotonic()

    def forget(self, number: int) -> None:
        """Forget an island."""
        self._connected.pop(number, None)
        self._heard.pop(number, None)

    def make_room(self, records: Records) -> list[int]:
        """Return the islands to forget when one more enters: those that have left, then those that fell silent.

        Raises:
            ValueError: if too many of them are alive.
        """
        islands = records.islands
        excess = len(islands) + 1 - self._room.islands
        if excess <= 0:
            return []
        longest_ago = sorted(islands, key=lambda number: (not islands[number].has_left, self._last(number)))
        dead = [number for number in longest_ago if islands[number].has_left or not self._is_alive(number)][:excess]
        if len(dead) < excess:
            raise ValueError(
                f"there are {len(islands)} islands (allowed: {self._room.islands}); stop some of them, or wait "
                f"{self._room.quiet:g} s after the last call of those that died"
            )
        return dead

    def _last(self, number: int) -> float:
        return self._heard.get(number, self._begun)

    def _is_alive(self, number: int) -> bool:
        return number in self._connected or time.monotonic() - self._last(number) < self._room.quiet


def check_holder(records: Records, number: int, token: object) -> None:
    """Raise ValueError unless the sender is the process that entered or resumed island `number` last."""
    island = records.islands.get(number)
    if island is None:
        raise ValueError(f"island {number} is not known to this server")
    if not isinstance(token, str) or not token or not hmac.compare_digest(token.encode(), island.token.encode()):
        raise ValueError(f"another process has entered or resumed island {number}")
    if island.has_left:
        raise ValueError(f"island {number} has left")


@dataclass
class _Call:
    """Call that waits for the parts of all ranks, or that was carried out, with `answers` by place."""

    first: Part
    parts: dict[int, tuple[Part, Head, Buffer]] = field(default_factory=dict)
    answers: dict[int, Answer] | None = None


class Service:
    """Server of one `Store`.

    Args:
        file: file of the state; None keeps it in memory only.
        report: receives log lines.
        room: limit on the number of islands.

    Raises:
        OSError: if `file` cannot be written.
        StateError: if it is damaged.
    """

    def __init__(self, file: Snapshot | None, report: Callable[[str], None], room: Room = DEFAULT_ROOM) -> None:
        self._file, self._report, self._notices = file, report, RateLimitedLog(report)
        found = None if file is None else file.read()
        self.store = Store(Records(uuid.uuid4().hex[:12])) if found is None else found
        self._saved, self._next_save = self.store.records, 0.0
        self._change = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._members = Membership(room)
        if found is None:
            self._save(self.store.records, self.store.places)

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
        return max(_SLACK + 4 * one.anchor.numel() for one in places) if places else LARGEST_BODY

    def refusal(self, head: Head, size: int) -> Answer | None:
        """Return the refusal of a message whose body of `size` bytes was not read yet; None if it may be read."""
        try:
            if head["kind"] in _SIMPLE:
                integer(size, "the body", most=0)
            elif size:
                part = read_part(head, size)
                with self._change:
                    return self._check(part)
        except ValueError as error:
            return _refused(f"{error}"), b""
        return None

    def disconnect(self, caller: Connection) -> None:
        """Record that a connection has ended. Its island gets the whole anchor when it calls again."""
        with self._change:
            for number in self._members.lose(caller):
                self.store.forget(number)

    def close(self) -> None:
        """Save everything, and release the file for another server."""
        with self._change:
            self._save_calls()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _carry_out(self, heads: list[Head], bodies: list[Buffer]) -> Change:
        """Carry out a call, and save it if it is time."""
        change = self.store.prepare(heads, bodies)
        self.store.commit(change)
        # Islands do not keep a seed for long, because it is as large as the model.
        if heads[0]["kind"] == "seed" or time.monotonic() >= self._next_save:
            self._save_calls()
        return change

    def _admit(self, head: Head) -> None:
        """Carry out that an island enters or resumes, after saving it.

        Raises:
            OSError: if it cannot be saved. Nothing has changed then.
        """
        change = self.store.prepare([head], [b""])
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
        self._admit(entry)
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
        self._admit({"kind": "resume", "number": number, "token": token})
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
            lost = self._check(part)
            if lost is not None:
                return lost
            if part.place == 0:
                self._members.record_call(part.number, caller)
            answer, payload = self._answer_part(part, head, body, caller)
            if part.is_again:
                # The island does not read it, so it must not count as what the island holds.
                self.store.forget(part.number)
                payload = b""
            saved = self._saved.islands.get(part.number)
            return {**answer, "saved": 0 if saved is None else saved.call}, payload

    def _check(self, part: Part) -> Answer | None:
        """Return the answer to a call before which others of the island were lost in a crash; None if there are none.

        Raises:
            ValueError: if the call cannot be carried out.
        """
        check_holder(self.store.records, part.number, part.token)
        missing = max(self.store.records.islands[part.number].call + 1, part.oldest)
        if part.oldest and missing < part.call:
            return {"kind": "again", "call": missing}, b""
        self.store.check(part)
        return None

    def _answer_part(self, part: Part, head: Head, body: Buffer, caller: Connection) -> Answer:
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


_SIMPLE: Mapping[str, Callable[[Service, Head, Connection], Head]] = {
    "enter": Service._enter,
    "resume": Service._resume,
    "leave": Service._leave,
    "status": Service._status,
}


def _refused(why: str) -> Head:
    return {"kind": "refused", "why": why}
