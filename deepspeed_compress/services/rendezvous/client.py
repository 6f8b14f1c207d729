"""An island's side of the talk with its coordinator: one connection, kept up by threads of its own."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.services.rendezvous.wire import LONGEST, Anchor, Message, Outcome, Round, decode, encode

__all__ = ["Client", "forget", "status"]

_ANSWERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "arrive": frozenset({"round", "over", "anchor"}),
        "vote": frozenset({"outcome"}),
        "sources": frozenset({"anchor"}),
        "claim": frozenset({"anchor"}),
    }
)
BEATS = 4
"""In `timeout`."""
PAUSE = 0.2
"""Seconds between attempts to connect."""


class Client:
    """Joins as a new island when it is made. Call it from one thread; ask again for nothing.

    Every request is repeated when a connection was lost meanwhile. IslandError where none is answered for `give_up`
    seconds, ConfigError where the coordinator refuses this island.

    Args:
        address: "host:port" of the coordinator.
        timeout: seconds of silence after which either side takes the other for dead.
        give_up: seconds.
        terms: what all islands must have alike; `timeout` and `minimum` among it.
        store: "host:port" of the store of this island.
        addresses: "host:port" at which each rank hands out its anchor.
        process: what tells this process from all others; "" where it may be several islands.
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
    ) -> None:
        self.run: str | None = None
        self.number = -1
        self.opened = False
        """Whether others wait for this island to exchange."""
        self.version = 0
        """Of the anchor that this island has: what it says when it joins again."""
        self._address, self._timeout, self._give_up = address, timeout, give_up
        self._joining: dict[str, Any] = {"kind": "join", "name": uuid.uuid4().hex, "terms": dict(terms), "store": store}
        self._joining |= {"addresses": list(addresses), "process": process, "give_up": float(give_up)}
        self._change = threading.Condition()
        self._speaking = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending: Message | None = None
        self._answer: Message | None = None
        self._why, self._refused = "it has not answered yet", ""
        self._heard = time.monotonic()
        self._closed = False
        for work in (self._stay_connected, self._beat):
            threading.Thread(target=work, daemon=True).start()
        try:
            with self._change:
                self._await(lambda: self.run is not None, time.monotonic())
        except BaseException:
            # Its threads would join later, and the others wait for an island that does not train.
            self.leave()
            raise

    def sources(self) -> Anchor:
        """Who has the newest anchor. Waits for as many islands as there must be."""
        return _anchor(self._ask({"kind": "sources"}))

    def claim(self, run: str, number: int, version: int) -> Anchor:
        """This island has loaded the anchor that island `number` of `run` saved: no sources if all begin with that."""
        return _anchor(self._ask({"kind": "claim", "run": run, "number": number, "version": version}))

    def ready(self, version: int) -> None:
        """This island has the anchor of `version`, and is waited for from now on."""
        self.version = version
        self._send({"kind": "ready", "version": version})

    def arrive(self, samples: int) -> Round | Anchor | None:
        """This island wants to exchange what it has moved by `samples`. None: too late for a round, go on. An Anchor:
        what it has does not belong to this run any more."""
        found = self._ask({"kind": "arrive", "version": self.version, "samples": samples})
        if found["kind"] == "anchor":
            return _anchor(found)
        return Round.of(found) if found["kind"] == "round" else None

    def vote(self, round_: int, ok: bool) -> Outcome:
        """Whether the round counts, now that this island says whether its exchange was `ok`."""
        while True:
            found = self._ask({"kind": "vote", "round": round_, "ok": ok})
            if found["id"] == round_:
                return Outcome(round_, found["committed"])

    def leave(self) -> None:
        """Leave for ever."""
        self._send({"kind": "leave"})
        self._closed = True
        self._hang_up()

    def _ask(self, message: Message) -> Message:
        with self._change:
            self._answer, self._pending = None, message
        self._send(message)
        with self._change:
            self._await(lambda: self._answer is not None, time.monotonic(), long=message["kind"] == "vote")
            found, self._answer, self._pending = self._answer, None, None
        assert found is not None
        return found

    def _await(self, done: Any, begun: float, long: bool = False) -> None:
        """`long`: others may take their time, as long as the coordinator is there."""
        while not done():
            if self._refused:
                raise ConfigError(
                    f"/deepspeed_compress/islands/elastic/rendezvous: {self._address} refuses this island: "
                    f"{self._refused} (allowed: the same in all islands); write the same, or name another coordinator"
                )
            left = max(begun, self._heard if long else 0.0) + self._give_up - time.monotonic()
            if left <= 0:
                raise IslandError(
                    f"/deepspeed_compress/islands/elastic/rendezvous: {self._address} has let this island wait for "
                    f"more than give_up, {self._give_up:g} s: {self._why}. Nothing was exchanged since version "
                    f"{self.version}, and to train on alone is not allowed; start the coordinator with its --state, or "
                    "more islands, and this one again"
                )
            self._change.wait(min(left, 0.5))

    def _send(self, message: Message) -> None:
        """Or not: what matters is said again after the next `join`."""
        there = self._socket
        if there is not None:
            # Two threads speak, and a line must stay whole.
            with self._speaking, contextlib.suppress(OSError):
                there.sendall(encode(message))

    def _beat(self) -> None:
        while not self._closed:
            time.sleep(self._timeout / BEATS)
            self._send({"kind": "beat"})

    def _stay_connected(self) -> None:
        host, _, port = self._address.rpartition(":")
        while not self._closed and not self._refused:
            try:
                with socket.create_connection((host, int(port)), timeout=self._timeout) as there:
                    self._talk(there)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                # What is no message is of something else that listens there.
                self._why = f"it cannot be reached ({error or type(error).__name__})"
            finally:
                self._socket = None
            time.sleep(PAUSE)

    def _talk(self, there: socket.socket) -> None:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = there
        self._join()
        with there.makefile("rb") as lines:
            while line := lines.readline(LONGEST):
                self._hear(decode(line))
        raise ConnectionError("it has closed the connection")

    def _join(self) -> None:
        known = {} if self.run is None else {"run": self.run, "number": self.number}
        self._send({**self._joining, "version": self.version, **known})
        pending = self._pending
        if pending is not None:
            self._send(pending)

    def _hear(self, message: Message) -> None:
        with self._change:
            self._heard, kind = time.monotonic(), message["kind"]
            if kind == "welcome":
                self.run, self.number = message["run"], message["number"]
            elif kind == "open":
                self.opened = True
            elif kind == "refused":
                self._refused = message["why"]
            elif kind == "waiting":
                self._why = message["why"]
            elif kind == "unknown":
                self._join()
            elif self._pending is not None and kind in _ANSWERS[self._pending["kind"]]:
                self._answer = message
                # Here, for the next round may be open before whoever asked has heard.
                self.opened = self.opened and self._pending["kind"] != "arrive"
            self._change.notify_all()

    def _hang_up(self) -> None:
        there = self._socket
        if there is not None:
            with contextlib.suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)


def _anchor(message: Message) -> Anchor:
    return Anchor(message["version"], message["sources"])


def status(address: str, timeout: float = 5.0) -> dict[str, Any]:
    """Return what the coordinator at `address` says of itself. Raises OSError if it does not answer."""
    return _status_after(address, timeout)


def forget(address: str, numbers: Sequence[int], timeout: float = 5.0) -> dict[str, Any]:
    """Declare the islands `numbers` gone for ever, and return the status of the coordinator after that.

    Raises OSError if it does not answer, ValueError if it is not a coordinator.
    """
    return _status_after(address, timeout, {"kind": "forget", "numbers": list(numbers)})


def _status_after(address: str, timeout: float, *messages: Message) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as there, there.makefile("rb") as lines:
        for message in (*messages, {"kind": "status"}):
            there.sendall(encode(message))
        return decode(lines.readline(LONGEST))
