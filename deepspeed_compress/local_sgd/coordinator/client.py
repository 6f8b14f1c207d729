"""An island's side of the connection to its coordinator, which its own threads maintain."""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.coordinator.messages import COORDINATOR, FROM_COORDINATOR, AnchorSources, Round
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import LARGE_HEAD, Connection, Head, Limits
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
"""Longest time in seconds that an ending island waits until the server has received its message."""
STATUS_TIMEOUT = 5.0
"""Longest time in seconds that a user waits for a summary."""


class CoordinatorClient:
    """Client that joins as a new island when it is made. Call it from one thread.

    Every request is repeated if a connection was lost in the meantime, so callers need not retry.

    Args:
        address: "host:port" of the coordinator.
        give_up: seconds without an answer after which a request fails.
        terms: settings that all islands must share, including `minimum`, and `timeout`: seconds of silence after which
            either side considers the other dead.
        store: "host:port" of the store of this island.
        addresses: "host:port" at which each rank serves its anchor.
        process: unique identifier of this process; "" if it may hold several islands.

    Raises:
        ConfigError: from any request, if the coordinator refuses this island.
        IslandError: from any request that is not answered for `give_up` seconds.
    """

    def __init__(
        self, address: str, give_up: float, terms: Mapping[str, Any], store: str, addresses: Sequence[str], process: str
    ) -> None:
        self.run: str | None = None
        self.number = -1
        self.is_awaited = False
        """True if others wait for this island to exchange."""
        self.version = 0
        """Version of this island's anchor, which it reports when it joins again."""
        self._address, self._timeout, self._give_up = address, float(terms["timeout"]), give_up
        self._joining: dict[str, Any] = {"kind": "join", "name": uuid.uuid4().hex, "terms": dict(terms), "store": store}
        self._joining |= {"addresses": list(addresses), "process": process, "give_up": float(give_up)}
        self._change = threading.Condition()
        self._credentials = Credentials.find()
        self._connection: Connection | None = None
        self._pending: Head | None = None
        self._answer: Any = None
        self._reason, self._refusal = "it has not answered yet", ""
        self._last_message = time.monotonic()
        self._closed = False
        self._connecting = threading.Thread(target=self._stay_connected, daemon=True)
        self._connecting.start()
        threading.Thread(target=self._send_beats, daemon=True).start()
        try:
            with self._change:
                self._wait_until(lambda: self.run is not None)
        except BaseException:
            # Its threads would join later, and the others would wait for an island that does not train.
            self.leave()
            raise

    def sources(self) -> AnchorSources:
        """Return the islands that hold the newest anchor. Blocks until `minimum` islands have joined."""
        return cast(AnchorSources, self._ask({"kind": "sources"}))

    def claim(self, run: str, number: int, version: int) -> AnchorSources:
        """Report that this island has loaded the anchor that island `number` of `run` saved.

        Returns:
            The anchor to use, without sources if all islands begin with the loaded one.
        """
        return cast(AnchorSources, self._ask({"kind": "claim", "run": run, "number": number, "version": version}))

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
        return found if isinstance(found, AnchorSources | Round) else None

    def vote(self, round_: int, ok: bool) -> bool:
        """Report whether this island's exchange was `ok`, and return True if the round is committed."""
        while True:
            found = self._ask({"kind": "vote", "round": round_, "ok": ok})
            if found.id == round_:
                return bool(found.committed)

    def leave(self) -> None:
        """Leave for good. The coordinator ends the connection once it has received the message."""
        self._closed = True
        self._send({"kind": "leave"})
        if self._connection is not None:
            self._connecting.join(LEAVE_TIMEOUT)
        connection = self._connection
        if connection is not None:
            connection.end()

    def _ask(self, message: Head) -> Any:
        """Send a request, and return its answer, of a type in `FROM_COORDINATOR`."""
        with self._change:
            self._answer, self._pending = None, message
        self._send(message)
        with self._change:
            self._wait_until(lambda: self._answer is not None, long=message["kind"] == "vote")
            found, self._answer, self._pending = self._answer, None, None
        return found

    def _wait_until(self, done: Callable[[], bool], long: bool = False) -> None:
        """Wait until `done`.

        With `long`, wait as long as the coordinator is reachable, because other islands may be slow.
        """
        begun = time.monotonic()
        while not done():
            if self._refusal:
                raise ConfigError(f"/deepspeed_compress/islands/elastic/rendezvous: {self._refusal}")
            left = max(begun, self._last_message if long else 0.0) + self._give_up - time.monotonic()
            if left <= 0:
                raise IslandError(
                    f"/deepspeed_compress/islands/elastic/rendezvous: this island, which has version {self.version}, "
                    f"has waited for {self._address} for longer than give_up, {self._give_up:g} s: {self._reason}; "
                    "an island may not continue alone: restart the coordinator with its --state, or start more "
                    "islands, and then restart this one"
                )
            self._change.wait(min(left, 0.5))

    def _send(self, message: Head) -> None:
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
        limits, patience = Limits(head=LARGE_HEAD, patience=self._timeout), max(self._timeout, LEAST_CONNECT_TIMEOUT)
        while not self._closed and not self._refusal:
            try:
                with connect(self._address, COORDINATOR, self._credentials, patience, limits, self._timeout) as one:
                    self._receive_messages(one)
            except (OSError, ValueError) as error:
                self._reason = f"it cannot be reached ({error or type(error).__name__})"
                # A first attempt that cannot succeed is the last one. A run that has begun waits for `give_up`.
                if self.run is None and isinstance(error, AuthenticationError | OtherServiceError | ValueError):
                    with self._change:
                        self._refusal = f"{self._address}: {error}"
                        self._change.notify_all()
            finally:
                self._connection = None
            if not self._closed:
                time.sleep(PAUSE)

    def _receive_messages(self, connection: Connection) -> None:
        """Join, and handle messages until the connection ends. A request that is not answered yet is repeated."""
        self._connection = connection
        known = {} if self.run is None else {"run": self.run, "number": self.number}
        self._send({**self._joining, "version": self.version, **known})
        pending = self._pending
        if pending is not None:
            self._send(pending)
        while (head := connection.receive(self._timeout)) is not None:
            self._handle(head["kind"], FROM_COORDINATOR.read(head))
            if self._refusal:
                return
        raise TimeoutError(f"it has been silent for {self._timeout:g} s")

    def _handle(self, kind: str, message: Any) -> None:
        with self._change:
            self._last_message = time.monotonic()
            if kind == "welcome":
                self.run, self.number = message.run, message.number
            elif kind == "open":
                self.is_awaited = True
            elif kind == "refused":
                self._refusal = (
                    f"{self._address} refuses this island: {message.why} (allowed: the same in all islands); write "
                    "the same value in all islands, or name another coordinator"
                )
            elif kind == "waiting":
                self._reason = message.why
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


def _status_after(address: str, service: str, *requests: Head) -> dict[str, Any]:
    """Send the requests of a user, and return the summary after that."""
    limits = Limits(head=LARGE_HEAD, patience=STATUS_TIMEOUT)
    with connect(address, service, Credentials.find(), STATUS_TIMEOUT, limits) as connection:
        for request in (*requests, {"kind": "status"}):
            connection.send(request)
        answer = connection.receive(STATUS_TIMEOUT)
    if answer is None:
        raise TimeoutError(f"no answer for {STATUS_TIMEOUT:g} s")
    return {key: value for key, value in answer.items() if key != "kind"}
