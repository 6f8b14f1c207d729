"""Coordinator of islands: a pure state machine, without sockets or a clock, and its server.

There is one coordinator, and it alone decides which islands take part in a round and whether the round is committed. So
two groups of islands cannot both continue: an island that cannot reach the coordinator does not exchange. An outcome is
saved before any island is told, and every other round is void for good, so an island that returns later is told the
same as the others. A round is also void if its result was lost with all islands that had it, and the others have
continued from an older anchor.

**Membership.** Decisions are made from the islands that are known and have not left, not from those that happen to be
connected (`KnownIslands`). An island is known from when it has an anchor of the run until it sends `leave`, another
process loads its checkpoint, or a user removes it (`forget`).

1. The run continues from the newest anchor that a known island has. If none of its holders is connected, the others
train without exchanging. Once these holders have been absent for longer than their patience (half of their `give_up`),
the run continues from the newest anchor that is connected.
2. After the first exchange no island begins again with its own weights, however long the holders are absent, and terms
stay as they are. A newcomer is told to train with its own weights, which have no effect on the run, so that it can load
a checkpoint; when it requests an exchange it waits, and is told which islands are missing.
3. If no connected island has an anchor, the run continues from the newest checkpoint that was loaded, once `minimum`
islands have loaded one and more than half of the islands of the last round are back, have left, or were absent for
longer than their patience. A checkpoint of another run does not replace anchors that known islands hold.
4. Before the first exchange an absent island whose patience is over is forgotten. Then the run may begin again.

A restarted coordinator does not know which islands died in the meantime. It closes no round before more than half of
the islands of the last one have returned, or have left: another coordinator, started elsewhere from a copy of the file,
would otherwise continue with the islands that reach it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.local_sgd.coordinator.membership import Membership
from deepspeed_compress.local_sgd.coordinator.messages import COORDINATOR, FROM_ISLANDS, Claim, Forget, Ready, Vote
from deepspeed_compress.local_sgd.coordinator.records import Saved
from deepspeed_compress.local_sgd.coordinator.requests import AnchorRequests, Rounds
from deepspeed_compress.safe_files import hold, sync_directory, write_text
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.machine_server import MachineServer, Message
from deepspeed_compress.transport.messages import Fields
from deepspeed_compress.transport.server import ignore


class Coordinator:
    """Decisions on membership, rounds, and their commitment.

    Pass it messages (`handle`), lost connections (`disconnect`) and the time (`tick`), in seconds of any clock; then
    send the messages that `take_messages` returns, after saving `to_save` if it has changed.

    Args:
        saved: the state.
        came_back: True if `saved` is from an earlier process.
        log: receives log lines.

    Attributes:
        membership: the islands of the run.
        service: see `Machine`.
        messages: see `Machine`.
        requests: see `Machine`.
    """

    service, messages, requests = COORDINATOR, FROM_ISLANDS, frozenset({"forget"})

    def __init__(self, saved: Saved, came_back: bool = False, log: Callable[[str], None] = ignore) -> None:
        self.saved = saved
        self.membership = Membership(saved, came_back, log)
        self._rounds = Rounds(self.membership)
        self._anchor_requests = AnchorRequests(self.membership)
        self._handlers: Mapping[str, Callable[[str, Any, float], None]] = {
            "join": self.membership.join,
            "beat": lambda *_: None,
            "ready": self._ready,
            "claim": self._anchor_requests.claim,
            "arrive": self._rounds.arrive,
            "vote": self._rounds.vote,
            "sources": self._anchor_requests.add,
            "leave": self._leave,
            "forget": self._forget,
        }

    def to_save(self) -> str:
        """Return `saved` as JSON."""
        return json.dumps(asdict(self.saved))

    def take_messages(self) -> list[tuple[str, Message]]:
        """Return the messages to send, in order, each with the name of its island."""
        return self.membership.take_messages()

    def handle(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of the island `name`, which is a new name for every process.

        Raises:
            ValueError: if it is not a valid message, or cannot be true. Nothing has changed then.
        """
        request = FROM_ISLANDS.read(message)
        version = request.round if isinstance(request, Vote) else getattr(request, "version", 0)
        # Other messages come from islands of this run only, so a round must have had the version.
        names_run = isinstance(request, Claim) or getattr(request, "run", None) is not None
        if not names_run and version >= self.saved.next_round:
            raise ValueError(f"version {version} belongs to no round (allowed: up to {self.saved.next_round - 1})")
        if name not in self.membership.connected and message["kind"] not in ("join", "forget"):
            # It was refused, or has left.
            return
        self._handlers[message["kind"]](name, request, now)
        self.tick(now)

    @property
    def timeout(self) -> float:
        """Return the seconds of silence after which an island is lost."""
        return self.membership.timeout

    def disconnect(self, name: str, now: float, why: str) -> None:
        """Handle the end of the connection to `name`, and its reason."""
        island = self.membership.connected.pop(name, None)
        if island is not None:
            self.membership.log(f"{island.title} {why}; {len(self.membership.connected)} connected")
            self.membership.known.lose(island.number, now)
            self._rounds.abandon(name)
            self.tick(now)

    def status(self, now: float) -> dict[str, Any]:
        """Return a summary for users: the run, its newest version, and the islands that are connected or missing."""
        islands = [
            {"number": one.number, "host": one.host, "version": one.version, "waiting": one.arrived is not None}
            for one in sorted(self.membership.connected.values(), key=lambda one: one.number)
        ]
        missing = sorted(self.membership.absent(since=0).items())
        running = self._rounds.running
        return {
            "run": self.saved.run,
            "version": self.saved.version,
            "round": None if running is None else running.id,
            "islands": islands,
            "missing": [{"number": number, "host": one.host, "version": one.version} for number, one in missing],
        }

    def tick(self, now: float) -> None:
        """Make the decisions that the time allows, or a message or lost connection that was just handled."""
        self.membership.known.expire(now)
        self._rounds.decide()
        self._anchor_requests.accept_claims()
        self._anchor_requests.answer(now)
        self._rounds.close(now)

    def _ready(self, name: str, ready: Ready, now: float) -> None:
        self.membership.set_version(self.membership.connected[name], ready.version)

    def _leave(self, name: str, leave: Fields, now: float) -> None:
        self.membership.known.remove([self.membership.connected[name].number])
        self.disconnect(name, now, "left")

    def _forget(self, name: str, forget: Forget, now: float) -> None:
        """Remove the named islands, except connected ones."""
        self.membership.known.remove({*forget.numbers} - self.membership.numbers())


class HeldFile:
    """File `path` that only one server may hold. Its directory is created.

    Removes what servers that were killed have left of the file.

    Raises:
        ConfigError: if another server holds it.
    """

    def __init__(self, path: Path) -> None:
        held = hold(path.parent, f"{path.name}.lock")
        if held is None:
            raise ConfigError(f"--state {path}: another coordinator uses this file; stop it, or give another file")
        for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
            left.unlink(missing_ok=True)
        self._path, self._lock = path, held

    def close(self) -> None:
        """Release the file for another server."""
        self._lock.close()


class StateFile(HeldFile):
    """File in which a coordinator keeps `Saved`."""

    def read(self) -> Saved | None:
        """Return the state that the last coordinator left; None if there is none.

        Raises:
            StateError: if it is damaged.
        """
        try:
            return Saved(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise StateError(
                f"--state {self._path}: the file is damaged, or was not written by a coordinator ({error!r}); give "
                "another file"
            ) from error

    def write(self, text: str) -> None:
        """Write `text`. It is on disk when this returns, as a whole or not at all."""
        write_text(self._path, text, private=True)
        sync_directory(self._path.parent)


def island_server(
    file: StateFile | None, host: str, port: int, report: Callable[[str], None] = ignore
) -> MachineServer:
    """Return a server for a coordinator of islands, which continues from the state in `file`, if any."""
    saved = file.read() if file is not None else None
    machine = Coordinator(saved or Saved(), saved is not None, report)
    return MachineServer(machine, file, host, port, report, Credentials.find())
