"""The process of a coordinator: connections, the clock, and the file that it comes back from."""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.services.rendezvous.coordinator import Coordinator
from deepspeed_compress.services.rendezvous.records import Saved
from deepspeed_compress.services.rendezvous.wire import LONGEST, Message, decode, encode

__all__ = ["Machine", "Server", "StateFile", "hold", "island_server", "put_in_place"]

TICK = 0.1
"""Seconds between looks at the clock."""


def hold(path: Path) -> TextIO:
    """The file `path`, for as long as what is returned is open; its directory is made. ConfigError where another
    process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.with_suffix(path.suffix + ".lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise ConfigError(f"--state {path}: another coordinator has it; end that one, or give another file") from error
    return held


def put_in_place(temporary: Path, path: Path) -> None:
    """`temporary`, which is on the disk, becomes `path`, and is so after a loss of power too."""
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class StateFile:
    """Where a coordinator keeps `Saved`. Only one coordinator at a time: ConfigError where another one has it."""

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, hold(path)

    def read(self) -> Saved | None:
        """What the last coordinator left; None where there was none. StateError where it is damaged."""
        try:
            return Saved(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise StateError(
                f"{self._path} is damaged or not of a coordinator ({error!r}); give another file"
            ) from error

    def write(self, text: str) -> None:
        """On the disk when this returns, as a whole or not at all."""
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, self._path)

    def close(self) -> None:
        self._held.close()


class Machine(Protocol):
    """What a server serves: a state machine without sockets and clock, as `Coordinator` is."""

    def hear(self, name: str, message: Message, now: float) -> None:
        """`message` of `name`. ValueError where it is none."""

    def lost(self, name: str, now: float) -> None:
        """The connection to `name` has ended."""

    def tick(self, now: float) -> None:
        """It is `now`, in seconds of any clock."""

    def take(self) -> list[tuple[str, Message]]:
        """What is to be said to whom, in order."""

    def status(self) -> Message:
        """For people."""

    def to_save(self) -> str:
        """What must be on the disk before anything is said."""


def island_server(
    file: StateFile | None, host: str, port: int, told: Callable[[str], None] = lambda text: None
) -> "Server":
    """Serves a coordinator of islands, which comes back from `file` where there was one."""
    saved = file.read() if file is not None else None
    return Server(Coordinator(saved or Saved(), came_back=saved is not None), file, host, port, told)


class Server:
    """Serves one `machine` at `host`:`port`, 0 for a free one. `told` gets a line for people now and then."""

    def __init__(
        self,
        machine: Machine,
        file: StateFile | None,
        host: str,
        port: int,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._machine, self._file, self._host, self.port, self._told = machine, file, host, port, told
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._written = ""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Until `stop`. `ready` is called when islands can connect. OSError where `host`:`port` cannot be had."""
        asyncio.run(self._run(ready))

    def stop(self) -> None:
        """From any thread. Nothing where it does not run."""
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _run(self, ready: Callable[[], None]) -> None:
        server = await asyncio.start_server(self._connected, self._host, self.port, limit=LONGEST)
        # Where somebody else has the address there is nothing to stop, and no loop any more.
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.port = server.sockets[0].getsockname()[1]
        self._deliver()
        ready()
        while not self._stop.is_set():
            self._machine.tick(time.monotonic())
            self._deliver()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK)
        server.close()
        for writer in self._writers.values():
            writer.close()
        if self._file is not None:
            self._file.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of one connection, until it ends. What is no message ends it."""
        name = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, asyncio.CancelledError):
            while line := await reader.readline():
                message = decode(line)
                if message["kind"] == "status":
                    writer.write(encode({"kind": "status", **self._machine.status()}))
                    continue
                if message["kind"] == "enter":
                    writer.write(encode({"kind": "refused", "why": _ROUNDS}))
                    continue
                if message["kind"] == "join":
                    name = str(message["name"])
                    self._writers[name] = writer
                self._machine.hear(name, message, time.monotonic())
                if message["kind"] == "beat":
                    writer.write(encode({"kind": "beat"}))
                self._deliver()
        if self._writers.get(name) is writer:
            # Not one that has connected again meanwhile.
            del self._writers[name]
            self._machine.lost(name, time.monotonic())
            self._deliver()
        writer.close()

    def _deliver(self) -> None:
        """Save first: whoever hears of an outcome must find it again."""
        text = self._machine.to_save()
        if text != self._written and self._file is not None:
            self._file.write(text)
        self._written = text
        for name, message in self._machine.take():
            self._tell(name, message)
            writer = self._writers.get(name)
            if writer is not None:
                writer.write(encode(message))

    def _tell(self, name: str, message: Message) -> None:
        if message["kind"] in _TOLD:
            self._told(f"{name[:8]}: " + json.dumps(message))


_TOLD = frozenset({"welcome", "refused", "outcome", "waiting", "unknown"})
_ROUNDS = "it settles rounds, and this island is asynchronous; start it with --parameter-server"
