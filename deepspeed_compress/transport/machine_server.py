"""Server of a state machine that knows no sockets: its connections, its clock, and the file from which it resumes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from deepspeed_compress.transport.connection import Connection, Head, Limits, encode
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import ProtocolError
from deepspeed_compress.transport.messages import Messages
from deepspeed_compress.transport.server import RateLimitedLog, Server

Message = Mapping[str, Any]
MEMBERS = Limits(patience=10.0)
"""Limits of what members may send."""
TICK = 0.1
"""Seconds between ticks of the clock."""
FLUSH = 0.5
"""Longest time in seconds that an ending server waits until clients have read their messages."""
JOIN_TIMEOUT = 30.0
"""Seconds that an authenticated client has to join, or to send a request."""


class Machine(Protocol):
    """State machine without sockets or a clock, such as `Coordinator`, for `Server` to serve.

    Attributes:
        service: name of the service.
        messages: messages that clients may send.
        requests: kinds of messages that a client may send without joining, such as a command of a user.
    """

    service: str
    messages: Messages
    requests: frozenset[str]

    @property
    def timeout(self) -> float:
        """Return the seconds of silence after which the connection to a client that has joined is ended."""

    def handle(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of `name`, which fits the table of messages."""

    def disconnect(self, name: str, now: float, why: str) -> None:
        """Handle the end of the connection to `name`, and its reason."""

    def tick(self, now: float) -> None:
        """Handle the time `now`, in seconds of any clock."""

    def take_messages(self) -> list[tuple[str, Message]]:
        """Return the messages to send, in order, each with its receiver."""

    def status(self, now: float) -> Message:
        """Return a summary for users."""

    def to_save(self) -> str:
        """Return the text that must be on disk before any message is sent."""


class StateFile(Protocol):
    """File of the state of a machine."""

    def write(self, text: str) -> None:
        """Write `text`. It is on disk when this returns, as a whole or not at all."""

    def close(self) -> None:
        """Release the file for another server."""


class ConnectedClient:
    """Client that is sent heads over `connection`, in order, without blocking the caller.

    One that does not read is disconnected once its queue is full, so its answers never fill memory.

    Args:
        connection: connection that nothing else sends over.
        count: largest number of waiting messages.
        size: largest number of waiting bytes, if there is more than one message.

    Attributes:
        name: name under which the client has joined; "" before it has.
    """

    def __init__(self, connection: Connection, count: int = 1024, size: int = 1 << 22) -> None:
        self.connection, self._count, self._size = connection, count, size
        self._waiting: deque[bytes] = deque()
        self._bytes, self.name = 0, ""
        self._change = threading.Condition()
        self._ended = False
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, head: Head) -> bool:
        """Queue `head`.

        Return False if it will not be sent, because the connection has ended, or is ended by this call.
        """
        frame = encode(head)
        with self._change:
            full = bool(self._waiting) and (len(self._waiting) >= self._count or self._bytes + len(frame) > self._size)
            if full:
                self.connection.end()
            if full or self._ended:
                return False
            self._waiting.append(frame)
            self._bytes += len(frame)
            self._change.notify_all()
        return True

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, at most `seconds`."""
        with self._change:
            self._change.wait_for(lambda: not self._bytes or self._ended, seconds)

    def end(self) -> None:
        """Stop writing. Does not wait."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                frame = self._waiting.popleft()
            try:
                self.connection.send_encoded(frame)
            except OSError:
                self.end()
            with self._change:
                self._bytes -= len(frame)
                self._change.notify_all()


class MachineServer:
    """Server of one `machine` at `host`:`port`; port 0 selects a free one.

    Each connection is read by its own thread, and written by another one. The machine
    is used by one thread at a time. Nothing that a client sends or leaves unread delays the others.

    Args:
        machine: called for every message. One that is not in its table ends the connection of its client.
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
        machine: Machine,
        file: StateFile | None,
        host: str,
        port: int,
        report: Callable[[str], None],
        credentials: Credentials,
    ) -> None:
        self._machine, self._file = machine, file
        # Any client that has the secret can be refused as often as it likes.
        self._notices = RateLimitedLog(report)
        self._transport = Server(machine.service, self._attend, host, port, credentials, MEMBERS, log=report)
        self.port = self._transport.port
        self._lock = threading.Lock()
        self._clients: dict[str, ConnectedClient] = {}
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
        """Tell the machine the time."""
        try:
            while not self._ended.wait(TICK):
                with self._lock:
                    self._machine.tick(time.monotonic())
                    self._deliver()
        except BaseException as error:
            self._broken = error
            self.stop()

    def _flush(self) -> None:
        """Flush all queues within `FLUSH` together."""
        deadline = time.monotonic() + FLUSH
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.flush(max(0.0, deadline - time.monotonic()))

    def _attend(self, connection: Connection) -> None:
        """Serve one connection until it ends. A malformed message ends it, and silence.

        After a stall of this process, a message that has arrived meanwhile is read before its client counts as silent.
        """
        client = ConnectedClient(connection)
        why = "was silent for longer than `timeout`"
        try:
            while (head := connection.receive(self._machine.timeout if client.name else JOIN_TIMEOUT)) is not None:
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
            client.end()
            with self._lock:
                # Otherwise it never joined, or has connected again in the meantime.
                if self._clients.get(client.name) is client:
                    del self._clients[client.name]
                    self._machine.disconnect(client.name, time.monotonic(), why)
                    self._deliver()

    def _handle(self, client: ConnectedClient, head: Message) -> None:
        now = time.monotonic()
        if head["kind"] == "status":
            client.put({"kind": "status", **self._machine.status(now)})
            return
        self._machine.messages.read(head)
        if head["kind"] == "join":
            self._join(client, head.get("name", ""))
        if not client.name and head["kind"] not in self._machine.requests:
            # A beat may overtake the first message of a client.
            return
        if head["kind"] == "beat":
            client.put({"kind": "beat"})
        self._machine.handle(client.name, head, now)
        self._deliver()

    def _join(self, client: ConnectedClient, name: str) -> None:
        if not name:
            raise ProtocolError("a client joined without a name")
        if client.name not in ("", name):
            raise ProtocolError("a client joined under a second name over the same connection")
        former = self._clients.get(name)
        if former is not None and former is not client:
            former.connection.end()
        client.name, self._clients[name] = name, client

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
            if client is not None:
                client.put(message)
                if message["kind"] == "refused":
                    self._notices(f"a client at {client.connection.peer} was refused: {message['why']}")
