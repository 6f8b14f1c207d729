"""A rank's side of the talk with a parameter server: calls that travel by a thread while training goes on."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import BinaryIO, cast

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.services.parameter_server.frames import Buffer, Head, receive, send
from deepspeed_compress.services.parameter_server.server import keep_alive

__all__ = ["PushClient"]

PAUSE = 0.2
"""Seconds between attempts to connect."""
GOODBYE = 1.0
"""Most seconds that the end of a rank waits for the server."""


class PushClient:
    """Takes calls to the server at `address` ("host:port"), one at a time, over a connection that is kept.

    A call is repeated when its connection is lost: the server carries it out once. IslandError where none is answered
    for `give_up` seconds, ConfigError where the server refuses it. `timeout`: seconds of silence of the network after
    which a connection is taken for lost. `pace`: waits until a body of so many bytes may leave.
    """

    def __init__(
        self, address: str, timeout: float, give_up: float, pace: Callable[[int], None] = lambda size: None
    ) -> None:
        self._address, self._timeout, self._give_up, self._pace = address, timeout, give_up, pace
        self._there: socket.socket | None = None
        self._stream: BinaryIO | None = None
        self._closed = False

    def start(self, head: Head, body: Buffer = b"") -> "Future[tuple[Head, Buffer]]":
        """Begin a call. `body` must stay as it is."""
        answer: Future[tuple[Head, Buffer]] = Future()
        # The end of a process waits for threads of executors, and not for these.
        threading.Thread(target=self._work, args=(answer, head, body), daemon=True).start()
        return answer

    def ask(self, head: Head, body: Buffer = b"") -> tuple[Head, Buffer]:
        """A call that is waited for."""
        deadline = time.monotonic() + self._give_up
        while (found := self._tried(head, body, deadline)) is None:
            time.sleep(PAUSE)
        if found[0]["kind"] == "refused":
            raise ConfigError(
                f"/deepspeed_compress/islands/elastic/rendezvous: {self._address} refuses this island: "
                f"{found[0]['why']}. Write what the other islands have, or name another server"
            )
        return found

    def _tried(self, head: Head, body: Buffer, deadline: float) -> tuple[Head, Buffer] | None:
        try:
            return self._once(head, body)
        except (OSError, EOFError, ValueError) as error:
            self._hang_up()
            if not self._closed and time.monotonic() < deadline:
                return None
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/rendezvous: {self._address} has not answered for more than "
                f"give_up, {self._give_up:g} s ({error or type(error).__name__}). To train on alone is not allowed; "
                "start the server with its --state, and this island again"
            ) from error

    def close(self, last: Head | None = None) -> None:
        """Give up calls that are under way, for ever. `last`: a message to send before, if the server answers soon."""
        self._closed = True
        self._hang_up()
        if last is not None:
            with contextlib.suppress(OSError, EOFError, ValueError):
                self._connect(min(self._timeout, GOODBYE), min(self._timeout, GOODBYE))
                self._once(last, b"")
            self._hang_up()

    def _work(self, answer: "Future[tuple[Head, Buffer]]", head: Head, body: Buffer) -> None:
        try:
            answer.set_result(self.ask(head, body))
        except BaseException as error:
            answer.set_exception(error)

    def _once(self, head: Head, body: Buffer) -> tuple[Head, Buffer]:
        stream = self._stream or self._connect(self._timeout, self._give_up)
        self._pace(len(body))
        send(stream, head, body)
        found = receive(stream)
        if found is None:
            raise ConnectionError("it has closed the connection")
        return found

    def _connect(self, timeout: float, patience: float) -> BinaryIO:
        host, _, port = self._address.rpartition(":")
        there = socket.create_connection((host, int(port)), timeout=timeout)
        # The server may be busy for long; whether it can be reached the kernel asks.
        there.settimeout(patience)
        keep_alive(there, self._timeout)
        self._there, self._stream = there, cast(BinaryIO, there.makefile("rwb"))
        return self._stream

    def _hang_up(self) -> None:
        there, self._there, self._stream = self._there, None, None
        if there is not None:
            with contextlib.suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)
            there.close()
