"""A rank's connection to a parameter server: calls that run in a thread while training continues."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.coordinator.client import LEAST_CONNECT_TIMEOUT, LEAVE_TIMEOUT, PAUSE
from deepspeed_compress.local_sgd.parameter_server.messages import PARAMETER_SERVER
from deepspeed_compress.transport.client import RequestClient, connect
from deepspeed_compress.transport.connection import Buffer, Connection, Head, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError

LARGEST_BODY = 1 << 36
"""Largest size in bytes of the weights of one rank."""
KEPT = 4
"""Most answered calls that a rank keeps until the server has saved them."""
_KEY = "/deepspeed_compress/islands/elastic/rendezvous"


class PushClient:
    """Client of the server at `address` ("host:port"): one call at a time, over a persistent connection.

    A call is repeated if its connection is lost; the server carries it out once. Answered calls are kept until the
    server has saved them, and sent again if it has lost them in a crash.

    Args:
        address: "host:port" of the server.
        timeout: seconds of network silence after which a connection is considered lost.
        give_up: seconds without an answer after which a call fails.
        pace: waits until a body of so many bytes may be sent.
    """

    def __init__(
        self, address: str, timeout: float, give_up: float, pace: Callable[[int], None] = lambda size: None
    ) -> None:
        self._address, self._timeout, self._give_up, self._pace = address, timeout, give_up, pace
        self._credentials = Credentials.find()
        # The server may be busy for long; the kernel checks whether it can be reached.
        self._requests = RequestClient(self._reconnect, give_up)
        self._kept: list[tuple[Head, Buffer]] = []
        """Answered calls that the server has not saved yet, from the oldest to the newest."""
        self._has_answered = False
        self._closed = False

    def start(self, head: Head, body: Buffer = b"") -> "Future[tuple[Head, Buffer]]":
        """Begin a call. `body` must not change any more."""
        answer: Future[tuple[Head, Buffer]] = Future()
        # A process waits at its end for threads of executors, but not for daemon threads.
        threading.Thread(target=self._run_call, args=(answer, head, body), daemon=True).start()
        return answer

    def ask(self, head: Head, body: Buffer = b"") -> tuple[Head, Buffer]:
        """Make a call, and wait for its answer.

        Raises:
            ConfigError: if the server refuses the call, or the connection cannot be made with this configuration.
            IslandError: if there is no answer for `give_up` seconds.
        """
        self._kept = [one for one in self._kept if one[0]["token"] == head.get("token")]
        more = {"oldest": self._kept[0][0]["call"]} if self._kept and "call" in head else {}
        while (answer := self._repeat({**head, **more}, body))[0]["kind"] == "again":
            for earlier, content in self._kept:
                if earlier["call"] >= answer[0]["call"]:
                    self._repeat({**earlier, "is_again": True}, content)
        if "call" in head:
            unsaved = [one for one in (*self._kept, (head, body)) if one[0]["call"] > answer[0]["saved"]]
            self._kept = unsaved[-KEPT:]
        return answer

    def _repeat(self, head: Head, body: Buffer) -> tuple[Head, Buffer]:
        """Make one call until it is answered. Raises as `ask` does."""
        deadline = time.monotonic() + self._give_up
        while (answer := self._try_once(head, body, deadline)) is None:
            time.sleep(PAUSE)
        if answer[0]["kind"] == "refused":
            raise ConfigError(
                f"{_KEY}: {self._address} refuses this island: {answer[0].get('why')}. Write the settings of the other "
                "islands, or name another server"
            )
        return answer

    def close(self, last: Head | None = None) -> None:
        """Abandon all calls in pending. `last` is a final message, sent if the server answers soon."""
        self._closed = True
        self._requests.end(LEAVE_TIMEOUT)
        if last is not None:
            with (
                contextlib.suppress(OSError, ValueError),
                self._open_connection(LEAVE_TIMEOUT, LEAVE_TIMEOUT) as connection,
            ):
                connection.send(last)
                connection.receive(LEAVE_TIMEOUT)

    def _try_once(self, head: Head, body: Buffer, deadline: float) -> tuple[Head, Buffer] | None:
        """Return the answer; None if it is worth trying again."""
        try:
            self._pace(len(body))
            answer = self._requests.request(head, body)
            self._has_answered = True
            return answer
        except (OSError, ValueError) as error:
            hopeless = isinstance(error, AuthenticationError | OtherServiceError | ValueError)
            if hopeless and not self._has_answered:
                raise ConfigError(f"{_KEY}: {error}") from error
            if not self._closed and time.monotonic() < deadline:
                return None
            raise IslandError(
                f"{_KEY}: {self._address} has not answered for more than give_up, {self._give_up:g} s "
                f"({error or type(error).__name__}); an island may not continue alone: restart "
                "the server with its --state, and then this island"
            ) from error

    def _run_call(self, answer: "Future[tuple[Head, Buffer]]", head: Head, body: Buffer) -> None:
        try:
            answer.set_result(self.ask(head, body))
        except BaseException as error:
            answer.set_exception(error)

    def _reconnect(self) -> Connection:
        if self._closed:
            raise ConnectionAbortedError("this island is ending")
        return self._open_connection(max(self._timeout, LEAST_CONNECT_TIMEOUT), self._give_up)

    def _open_connection(self, timeout: float, patience: float) -> Connection:
        limits = Limits(body=LARGEST_BODY, patience=patience)
        return connect(self._address, PARAMETER_SERVER, self._credentials, timeout, limits, self._timeout)
