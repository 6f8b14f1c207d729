"""Process of a coordinator: its connections, its clock, and the file from which it resumes."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.file_locks import lock
from deepspeed_compress.local_sgd.coordinator.coordinator import Coordinator
from deepspeed_compress.local_sgd.coordinator.membership_log import MembershipLog
from deepspeed_compress.local_sgd.coordinator.records import Saved
from deepspeed_compress.local_sgd.coordinator.requests import check_request
from deepspeed_compress.local_sgd.coordinator.wire import COORDINATOR, Message
from deepspeed_compress.safe_files import open_own
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import ProtocolError
from deepspeed_compress.transport.frames import Limits
from deepspeed_compress.transport.rate_limited_log import RateLimitedLog, ignore
from deepspeed_compress.transport.send_queue import SendQueue, flush_all
from deepspeed_compress.transport.server import Server as TransportServer

TICK = 0.1
"""Seconds between ticks of the clock."""
LATE = 1.0
"""Seconds between two ticks after which this process itself must have stalled. Pending messages are then read first."""
FLUSH = 0.5
"""Longest time in seconds that an ending server waits until clients have read their messages."""
JOIN_TIMEOUT = 30.0
"""Seconds that an authenticated client has to join, or to send a request."""
_LIMITS = Limits(head=1 << 20, patience=10.0, rate=200.0, burst=400)


def lock_file(path: Path) -> TextIO:
    """Lock the file `path` until the returned lock file is closed. Its directory is created.

    Raises:
        ConfigError: if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path.with_suffix(path.suffix + ".lock"), "w", opener=open_own)  # noqa: SIM115  (held by the caller)
    try:
        lock(file, waits=False)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"--state {path}: another coordinator uses this file; stop it, or give another file"
        ) from error
    return file


def rename_durably(temporary: Path, path: Path) -> None:
    """Rename `temporary`, which is on disk, to `path`, in a way that survives a power failure."""
    # First, because it fails if there are too many descriptors, and nothing must have changed then.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.replace(temporary, path)
        os.fsync(directory)
    finally:
        os.close(directory)


class StateFile:
    """File in which a coordinator keeps `Saved`. Only one coordinator may hold it.

    Raises:
        ConfigError: if another coordinator holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, lock_file(path)

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
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(temporary, self._path)

    def close(self) -> None:
        """Release the file for another coordinator."""
        self._lock.close()


class Machine(Protocol):
    """State machine without sockets or a clock, such as `Coordinator`, for `Server` to serve."""

    def handle(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of `name`, which fits the table of messages."""

    def disconnect(self, name: str, now: float) -> None:
        """Handle the end of the connection to `name`."""

    def tick(self, now: float) -> None:
        """Handle the time `now`, in seconds of any clock."""

    def take_messages(self) -> list[tuple[str, Message]]:
        """Return the messages to send, in order, each with its receiver."""

    def status(self, now: float) -> Message:
        """Return a summary for users."""

    def to_save(self) -> str:
        """Return the text that must be on disk before any message is sent."""


def island_server(file: StateFile | None, host: str, port: int, report: Callable[[str], None] = ignore) -> "Server":
    """Return a server for a coordinator of islands, which continues from the state in `file`, if any."""
    saved = file.read() if file is not None else None
    machine = Coordinator(saved or Saved(), came_back=saved is not None)
    service = Service(COORDINATOR, "island", check_request, frozenset({"forget"}))
    return Server(service, machine, file, host, port, report, Credentials.find())


@dataclass(frozen=True)
class Service:
    """Service of a server.

    Attributes:
        name: name of the service.
        member: noun for its clients.
        check: raises ProtocolError for a message that clients may not send.
        requests: kinds of messages that a client may send without joining, such as a command of a user.
    """

    name: str
    member: str
    check: Callable[[Message], object]
    requests: frozenset[str] = frozenset()


@dataclass
class _ConnectedClient:
    """Connection of a client, with the name under which it has joined ("" before it has)."""

    connection: Connection
    outgoing: SendQueue
    name: str = ""


class Server:
    """Server of one `machine` at `host`:`port`; port 0 selects a free one.

    Each connection is read by its own thread, as fast as `Limits.rate` allows, and written by another one. The machine
    is used by one thread at a time. Nothing that a client sends or leaves unread delays the others.

    Args:
        service: the service. A message that its check refuses ends the connection of its client.
        machine: called for every message.
        file: file to which the state is written before any message is sent; None writes nothing.
        host: address to listen at; "" for all.
        port: port to listen at; the attribute `port` has the selected one.
        report: receives log lines.
        credentials: credentials of this side.

    Raises:
        OSError: if the address is not available.
    """

    def __init__(
        self,
        service: Service,
        machine: Machine,
        file: StateFile | None,
        host: str,
        port: int,
        report: Callable[[str], None],
        credentials: Credentials,
    ) -> None:
        self._machine, self._service, self._file = machine, service, file
        self._log, self._notices = MembershipLog(report, service.member), RateLimitedLog(report)
        self._transport = TransportServer(service.name, self._attend, host, port, credentials, _LIMITS, log=report)
        self.port = self._transport.port
        self._lock = threading.Lock()
        self._clients: dict[str, _ConnectedClient] = {}
        self._written = ""
        self._ended = threading.Event()
        self._broken: BaseException | None = None

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `ready` is called when clients can connect."""
        clock = threading.Thread(target=self._keep_time, daemon=True)
        clock.start()
        try:
            self._transport.run(partial(self._begin, ready), self._flush)
        finally:
            self._ended.set()
            clock.join()
            if self._file is not None:
                self._file.close()
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """End `run`. It may be called from any thread or signal handler."""
        self._transport.stop()

    def _begin(self, ready: Callable[[], None]) -> None:
        with self._lock:
            self._deliver()
        ready()

    def _keep_time(self) -> None:
        """Tell the machine the time. After a stall of this process, pending messages are handled first."""
        last = time.monotonic()
        try:
            while not self._ended.wait(TICK):
                with self._lock:
                    now = time.monotonic()
                    if now - last < LATE:
                        self._machine.tick(now)
                        self._deliver()
                last = now
        except BaseException as error:
            self._broken = error
            self.stop()

    def _flush(self) -> None:
        with self._lock:
            queues = [client.outgoing for client in self._clients.values()]
        flush_all(queues, FLUSH)

    def _attend(self, connection: Connection) -> None:
        """Serve one connection until it ends. A malformed message ends it."""
        client = _ConnectedClient(connection, SendQueue(connection))
        why = "lost its connection"
        try:
            while (head := connection.receive(None if client.name else JOIN_TIMEOUT)) is not None:
                with self._lock:
                    self._handle(client, head)
                if head["kind"] == "leave":
                    # The client waits for the end of its connection.
                    return
        except OSError as error:
            why = f"lost its connection ({error})"
            if not client.name:
                raise
        finally:
            client.outgoing.end()
            with self._lock:
                self._disconnect(client, why)

    def _handle(self, client: _ConnectedClient, head: Message) -> None:
        now = time.monotonic()
        if head["kind"] == "status":
            client.outgoing.put({"kind": "status", **self._machine.status(now)})
            return
        self._service.check(head)
        if head["kind"] == "join":
            self._join(client, head.get("name", ""))
        if not client.name and head["kind"] not in self._service.requests:
            # A beat may overtake the first message of a client.
            return
        if head["kind"] == "beat":
            client.outgoing.put({"kind": "beat"})
        self._machine.handle(client.name, head, now)
        if head["kind"] == "leave":
            self._log.record_departure(client.name, "left")
        self._deliver()

    def _join(self, client: _ConnectedClient, name: str) -> None:
        if not name:
            raise ProtocolError("a client joined without a name")
        if client.name not in ("", name):
            raise ProtocolError("a client joined under a second name over the same connection")
        former = self._clients.get(name)
        if former is not None and former is not client:
            former.connection.end()
        client.name, self._clients[name] = name, client

    def _disconnect(self, client: _ConnectedClient, why: str) -> None:
        if self._clients.get(client.name) is not client:
            # It never joined, or has connected again in the meantime.
            return
        del self._clients[client.name]
        self._log.record_departure(client.name, why)
        self._machine.disconnect(client.name, time.monotonic())
        self._deliver()

    def _deliver(self) -> None:
        """Send messages, after saving the state: an island that was told an outcome must find it again later.

        Without a saved state nothing is sent.
        """
        text = self._machine.to_save()
        if text != self._written and self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._notices(f"no client is answered, because the state cannot be written ({error})")
                return
        self._written = text
        for name, message in self._machine.take_messages():
            client = self._clients.get(name)
            self._log.record(name, "" if client is None else client.connection.peer, message)
            if client is not None:
                client.outgoing.put(message)
