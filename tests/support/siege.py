"""Connections that only take the place of others, and the time of an honest client next to them and alone."""

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO

from tests.support.processes import join_threads, start_threads

__all__ = ["besieged", "drip", "medians", "open_unread", "serving_process"]

PACE = 0.05
"""Seconds of a round, in which connections send a piece."""
OPENED = 25
"""Largest number of connections that are opened in a round."""


def drip(content: bytes) -> list[bytes]:
    """Return the bytes of `content`, one by one."""
    return [content[place : place + 1] for place in range(len(content))]


@contextlib.contextmanager
def serving_process(program: str, *arguments: object, log: IO[bytes], descriptors: int) -> Iterator[tuple[int, int]]:
    """Run a Python program that prints the port of its server, and ends with its input. Yield its id and that port."""
    limited = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"]
    command = [*limited, sys.executable, "-c", program, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.kill()


@contextlib.contextmanager
def besieged(port: int, drips: Sequence[Sequence[bytes]], every: int = 1) -> Iterator[None]:
    """Keep a connection open for each of `drips`, which sends a piece of it now and then, and nothing after its end.

    Those that the server closes are opened again, 500 per second at most. The block begins when all have been opened.

    Args:
        port: port of the server.
        drips: pieces that each connection sends.
        every: number of rounds, of 0.05 s, in which a connection has one turn.
    """
    ready, over = threading.Event(), threading.Event()
    threads = start_threads(lambda: _besiege([_Place(port, drip) for drip in drips], every, ready, over))
    try:
        assert ready.wait(60)
        yield
    finally:
        over.set()
        join_threads(threads)


def _besiege(places: Sequence["_Place"], every: int, ready: threading.Event, over: threading.Event) -> None:
    opened = number = 0
    while not over.wait(PACE):
        number += 1
        lost = [place for place in places[number % every :: every] if not place.turn()][:OPENED]
        for place in lost:
            place.open()
        opened += len(lost)
        if opened >= len(places):
            ready.set()
    for place in places:
        place.close()


class _Place:
    """A connection that sends its pieces one by one."""

    def __init__(self, port: int, pieces: Sequence[bytes]) -> None:
        self._address, self._pieces, self._left = ("127.0.0.1", port), pieces, iter(pieces)
        self._socket: socket.socket | None = None

    def open(self) -> None:
        self.close()
        self._socket, self._left = socket.socket(), iter(self._pieces)
        self._socket.setblocking(False)
        self._socket.connect_ex(self._address)

    def turn(self) -> bool:
        """Send a piece. Return False if the connection is not open."""
        try:
            if self._socket is None:
                return False
            self._socket.send(next(self._left, b""))
            return self._socket.recv(1 << 16) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def open_unread(port: int, sent: bytes) -> socket.socket:
    """Return a connection that has sent `sent`, and into which little fits that nobody reads."""
    there = socket.socket()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    there.connect(("127.0.0.1", port))
    there.sendall(sent)
    return there


def medians(call: Callable[[], object], attack: Callable[[], AbstractContextManager[None]]) -> tuple[float, float]:
    """Return the median seconds of a call alone, and while `attack` runs.

    Calls alone are made before and after it, so that a machine that becomes slower counts for both.
    """
    alone = [_seconds(call) for _ in range(30)]
    with attack():
        attacked = [_seconds(call) for _ in range(60)]
    alone += [_seconds(call) for _ in range(30)]
    return statistics.median(alone), statistics.median(attacked)


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
