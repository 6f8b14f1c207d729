"""An island's side of the connection to its coordinator, which its own threads maintain."""

import contextlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.coordinator.messages import (
    COORDINATOR,
    FROM_COORDINATOR,
    AnchorSources,
    Message,
    Outcome,
    Round,
)
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import LARGE_HEAD, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError

_ANSWERS: Mapping[str, frozenset[str]] = {
    "arrive": frozenset({"round", "over", "anchor"}),
    "vote": frozenset({"outcome"}),
    "sources": frozenset({"anchor"}),
    "claim": frozenset({"anchor"}),
}
BEATS = 4
"""Number of beats in `timeout`."""
PAUSE = 0.2
"""Seconds between attempts to connect."""
LEAST_CONNECT_TIMEOUT = 5.0
"""Least timeout in seconds for connecting: short timeouts are meant for established connections."""
LEAVE_TIMEOUT = 1.0
"""Longest time in seconds that an ending island waits until the coordinator has received its message."""
STATUS_TIMEOUT = 5.0
"""Longest time in seconds that a user waits for a summary."""


class CoordinatorClient:
    """Client that joins as a new island when it is made. Call it from one thread.

    Every request is repeated if a connection was lost in the meantime, so callers need not retry.

    Args:
        address: "host:port" of the coordinator.
        timeout: seconds of silence after which either side considers the other dead.
        give_up: seconds without an answer after which a request fails.
        terms: settings that all islands must share, including `timeout` and `minimum`.
        store: "host:port" of the store of this island.
        addresses: "host:port" at which each rank serves its anchor.
        process: unique identifier of this process; "" if it may hold several islands.
        credentials: credentials of this side; None for those that the environment and the user's files name.

    Raises:
        ConfigError: from any request, if the coordinator refuses this island.
        IslandError: from any request that is not answered for `give_up` seconds.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        give_up: float,
        terms: Mapping[str, Any],
        store: str,
        addresses: Sequence[str],
        process: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        self.run: str | None = None
        self.number = -1
        self.is_awaited = False
        """True if others wait for this island to exchange."""
        self.version = 0
        """Version of this island's anchor, which it reports when it joins again."""
        self._address, self._timeout, self._give_up = address, timeout, give_up
        self._joining: dict[str, Any] = {"kind": "join", "name": uuid.uuid4().hex, "terms": dict(terms), "store": store}
        self._joining |= {"addresses": list(addresses), "process": process, "give_up": float(give_up)}
        self._change = threading.Condition()
        self._credentials = credentials or Credentials.find()
        self._connection: Connection | None = None
        self._pending: Message | None = None
        self._answer: Message | None = None
        self._reason, self._refusal = "it has not answered yet", ""
        self._last_message = time.monotonic()
        self._closed = False
        self._connecting = threading.Thread(target=self._stay_connected, daemon=True)
        self._connecting.start()
        threading.Thread(target=self._send_beats, daemon=True).start()
        try:
            with self._change:
                self._wait_until(lambda: self.run is not None, time.monotonic())
        except BaseException:
            # Its threads would join later, and the others would wait for an island that does not train.
            self.leave()
            raise

    def sources(self) -> AnchorSources:
        """Return the islands that hold the newest anchor. Blocks until `minimum` islands have joined."""
        return AnchorSources.model_validate(self._ask({"kind": "sources"}))

    def claim(self, run: str, number: int, version: int) -> AnchorSources:
        """Report that this island has loaded the anchor that island `number` of `run` saved.

        Returns:
            The anchor to use, without sources if all islands begin with the loaded one.
        """
        return AnchorSources.model_validate(
            self._ask({"kind": "claim", "run": run, "number": number, "version": version})
        )

    def ready(self, version: int) -> None:
        """Report that this island has the anchor of `version`, and must be waited for from now on."""
        self.version = version
        self._send({"kind": "ready", "version": version})

    def arrive(self, samples: int) -> Round | AnchorSources | None:
        """Request to exchange the weight changes of `samples` samples.

        Returns:
            The round; None if it is too late for one, so that the island continues to train; or AnchorSources if
                the anchor of this island no longer belongs to this run.
        """
        found = self._ask({"kind": "arrive", "version": self.version, "samples": samples})
        if found["kind"] == "anchor":
            return AnchorSources.model_validate(found)
        return Round.model_validate(found) if found["kind"] == "round" else None

    def vote(self, round_: int, ok: bool) -> Outcome:
        """Report whether this island's exchange was `ok`, and return whether the round is committed."""
        while True:
            found = self._ask({"kind": "vote", "round": round_, "ok": ok})
            if found["id"] == round_:
                return Outcome.model_validate(found)

    def leave(self) -> None:
        """Leave for good. The coordinator ends the connection once it has received the message."""
        self._closed = True
        self._send({"kind": "leave"})
        if self._connection is not None:
            self._connecting.join(LEAVE_TIMEOUT)
        connection = self._connection
        if connection is not None:
            connection.end()

    def _ask(self, message: Message) -> Message:
        with self._change:
            self._answer, self._pending = None, message
        self._send(message)
        with self._change:
            self._wait_until(lambda: self._answer is not None, time.monotonic(), long=message["kind"] == "vote")
            found, self._answer, self._pending = self._answer, None, None
        assert found is not None
        return found

    def _wait_until(self, done: Any, begun: float, long: bool = False) -> None:
        """Wait until `done`.

        With `long`, wait as long as the coordinator is reachable, because other islands may be slow.
        """
        while not done():
            if self._refusal:
                raise ConfigError(f"/deepspeed_compress/islands/elastic/rendezvous: {self._refusal}")
            left = max(begun, self._last_message if long else 0.0) + self._give_up - time.monotonic()
            if left <= 0:
                raise IslandError(
                    f"/deepspeed_compress/islands/elastic/rendezvous: this island has waited for {self._address} for "
                    f"longer than give_up, {self._give_up:g} s: {self._reason}. Its last exchange was version "
                    f"{self.version}, and an island may not continue alone; restart the coordinator with its --state, "
                    "or start more islands, and then restart this one"
                )
            self._change.wait(min(left, 0.5))

    def _send(self, message: Message) -> None:
        """Send `message` if there is a connection. Important messages are repeated after the next `join`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(message)

    def _send_beats(self) -> None:
        while not self._closed and not self._refusal:
            time.sleep(self._timeout / BEATS)
            self._send({"kind": "beat"})

    def _stay_connected(self) -> None:
        while not self._closed and not self._refusal:
            try:
                with self._connect() as connection:
                    self._receive_messages(connection)
            except (OSError, ValueError) as error:
                self._record_failure(error)
            finally:
                self._connection = None
            if not self._closed:
                time.sleep(PAUSE)

    def _connect(self) -> Connection:
        limits = Limits(head=LARGE_HEAD, patience=self._timeout)
        patience = max(self._timeout, LEAST_CONNECT_TIMEOUT)
        return connect(self._address, COORDINATOR, self._credentials, patience, limits, self._timeout)

    def _record_failure(self, error: OSError | ValueError) -> None:
        """Try again, unless it is the first attempt and cannot succeed. A run that has begun waits for `give_up`."""
        self._reason = f"it cannot be reached ({error or type(error).__name__})"
        if self.run is None and isinstance(error, AuthenticationError | OtherServiceError | ValueError):
            with self._change:
                self._refusal = f"{self._address}: {error}"
                self._change.notify_all()

    def _receive_messages(self, connection: Connection) -> None:
        self._connection = connection
        self._send_join()
        while (message := connection.receive(self._timeout)) is not None:
            FROM_COORDINATOR.read(message)
            self._handle(message)
            if self._refusal:
                return
        raise TimeoutError(f"it has been silent for {self._timeout:g} s")

    def _send_join(self) -> None:
        known = {} if self.run is None else {"run": self.run, "number": self.number}
        self._send({**self._joining, "version": self.version, **known})
        pending = self._pending
        if pending is not None:
            self._send(pending)

    def _handle(self, message: Message) -> None:
        with self._change:
            self._last_message, kind = time.monotonic(), message["kind"]
            if kind == "welcome":
                self.run, self.number = message["run"], message["number"]
            elif kind == "open":
                self.is_awaited = True
            elif kind == "refused":
                self._refusal = (
                    f"{self._address} refuses this island: {message['why']} (allowed: the same in all islands); write "
                    "the same value in all islands, or name another coordinator"
                )
            elif kind == "waiting":
                self._reason = message["why"]
            elif self._pending is not None and kind in _ANSWERS[self._pending["kind"]]:
                self._answer = message
                # Here, because the next round may open before the caller has received the answer.
                self.is_awaited = self.is_awaited and self._pending["kind"] != "arrive"
            self._change.notify_all()


def status(address: str) -> dict[str, Any]:
    """Return the summary of whichever service of this package runs at `address`.

    Raises:
        OSError: if nothing answers there in time, or something else does.
    """
    try:
        return _status_after(address, COORDINATOR)
    except OtherServiceError as error:
        return _status_after(address, error.service)


def forget(address: str, numbers: Sequence[int]) -> dict[str, Any]:
    """Remove the islands `numbers` for good, and return the coordinator's summary after that.

    Raises:
        OSError: if no coordinator answers at `address` in time.
    """
    return _status_after(address, COORDINATOR, {"kind": "forget", "numbers": list(numbers)})


def _status_after(address: str, service: str, *requests: Message) -> dict[str, Any]:
    """Send the requests of a user, and return the summary after that."""
    limits = Limits(head=LARGE_HEAD, patience=STATUS_TIMEOUT)
    with connect(address, service, Credentials.find(), STATUS_TIMEOUT, limits) as connection:
        for request in (*requests, {"kind": "status"}):
            connection.send(request)
        answer = connection.receive(STATUS_TIMEOUT)
    if answer is None:
        raise TimeoutError(f"no answer for {STATUS_TIMEOUT:g} s")
    return {key: value for key, value in answer.items() if key != "kind"}
