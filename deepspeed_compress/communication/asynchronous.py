"""Exchanges without rounds: an island pushes what it has moved to a server, and takes what all have found, when both
have travelled. Nobody waits for anybody, and training goes on meanwhile.

What masters have moved from the anchor that the island set out from is sent as in a round, with error feedback that
becomes final when the server has taken it. The answer is how the newest anchor differs from the one that the server
knows the island to hold; both add what it decodes to, so the next difference has what this one has left out, and no
memory is needed for that. Masters become the new anchor, and keep what they have moved since the push.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed_compress.communication.elastic import Met, group_of_one
from deepspeed_compress.communication.framed_messages import FramedMessages, as_bytes, read_bytes
from deepspeed_compress.communication.islands import ANCHOR, Masters, likeness
from deepspeed_compress.communication.reduction import Groups, Reductions, Site
from deepspeed_compress.communication.team import Cadence, Team, Word
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressError

__all__ = ["AsynchronousExchange", "Calls"]

_PAUSE = 0.1
"""Seconds before ranks ask again that were told of different versions."""

Said = tuple[Mapping[str, Any], bytes | bytearray | memoryview]
"""What is said, and the bytes that come with it."""


class Calls(Protocol):
    """See `parameter_server.client.PushClient`."""

    def start(self, head: Mapping[str, Any], body: Any = b"") -> "Future[Said]": ...
    def ask(self, head: Mapping[str, Any], body: Any = b"") -> Said: ...
    def close(self, last: Mapping[str, Any] | None = None) -> None: ...


@dataclass(frozen=True)
class _Flight:
    """A push that travels. `sent`: the masters when it left, `healthy` or not finite, after `samples` in all; it took
    `seconds` to leave."""

    answer: "Future[Said]"
    sent: Tensor
    healthy: bool
    samples: int
    seconds: float


class AsynchronousExchange:
    """The pushes and pulls of one rank.

    Args:
        settings: the section's `islands`, with `elastic.parameter_server`.
        masters: of this rank.
        site: of a group, what is remembered and counted.
        team: the ranks of this island.
        calls: of this rank to the server.
        terms: what islands must have alike.
        step: of the island's schedule.
        diverged: is called when the masters are those of the others again, after some were not finite.
    """

    def __init__(
        self,
        settings: Islands,
        masters: Masters,
        site: Callable[[Groups], Site],
        team: Team,
        calls: Calls,
        terms: Mapping[str, Any],
        step: Callable[[], int] = lambda: 0,
        diverged: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings, self._masters, self._team = settings, masters, team
        self._calls, self._terms, self._step, self._diverged = calls, terms, step, diverged
        alone = site(Groups(group_of_one()))
        self.stores, self._meter, self._parameters = alone.stores, alone.run.meter, alone.parameters
        self._segments = tuple(masters.segments)
        self._messages = FramedMessages(settings.exchange, self._segments, Reductions(alone))
        self._anchor = self.stores.get(ANCHOR, "fp32", scaled=False, transactional=False)
        self.run, self.number, self.version = "", -1, 0
        """The server's run, the number of this island, the version of the anchor that it set out from."""
        self._token = ""
        self._call, self._samples = 0, 0
        self._flight: _Flight | None = None
        self._word = Word(team)
        self._cadence = Cadence(settings.sync_steps, settings.sync_seconds)

    def start(self, samples: int = 0) -> Mapping[str, Any]:
        """Take the anchor, or begin with the own weights where there is none, after `samples` in all; what was said
        beside it. Collective in the island."""
        self._samples = samples
        head, _ = self._team.share(partial(self._calls.ask, {"kind": "enter", "terms": dict(self._terms)}))
        self.run, self.number, self._token = head["run"], head["number"], head["token"]
        return self._renew(claim=0)

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """Go on after a checkpoint was loaded, which `saved` is `described` of; None: of weights alone, after so many
        `steps`. Masters and the anchor are loaded. Collective in the island."""
        if self._flight is not None:
            self._heard(self._flight.answer)
            self._call += 1
        self._flight, self._samples = None, samples
        own = {"number": self.number, "token": self._token}
        head = {"kind": "resume", **own, "saved": saved or {"run": "", "number": -1}}
        answer, _ = self._team.share(partial(self._calls.ask, head))
        kind = answer["kind"]
        if kind == "resumed" and saved is not None:
            self.number, self._call, self.version = saved["number"], saved["call"], saved["version"]
            self._samples, self._token = saved["samples"], answer["token"]
            return {}
        # What it has sent since then has been taken, or is lost with the one that had it.
        for name, store in self.stores.by_name.items():
            if name != ANCHOR:
                store.clear()
        if kind == "newest":
            return self._renew(claim=None)
        return self._renew(claim=max(1, steps) if saved is None else saved["version"], loaded=saved is not None)

    def described(self) -> dict[str, Any]:
        """What `resume` must know."""
        about = {"run": self.run, "number": self.number, "call": self._call}
        return {**about, "version": self.version, "samples": self._samples}

    def step_ended(self, samples: int) -> Met | None:
        """After an optimizer step, `samples` in all: push if it is time, or take what has come. Collective in the
        island. IslandError where the server has not answered for `give_up`."""
        if not self._word.heard(self._team.place == 0 and self._wants()):
            return None
        if self._flight is not None:
            return self._land(self._flight)
        self._push(samples)
        return None

    def finish(self, patience: float) -> Met | None:
        """As before saving: take what comes within `patience` seconds. Collective in the island."""
        flight = self._flight
        if flight is None:
            return None
        deadline = time.monotonic() + patience
        while not flight.answer.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._land(flight) if self._team.all(flight.answer.done()) else None

    def leave(self) -> None:
        """Say goodbye, and end all calls. Does not wait for a server that does not answer."""
        entered = self._token and self._team.place == 0
        own = {"kind": "leave", "number": self.number, "token": self._token}
        self._calls.close(own if entered else None)

    def anchor(self) -> Tensor:
        """That this rank set out from: flat fp32, a copy."""
        return self._anchor.read(self._segments, self._masters.device)

    def _wants(self) -> bool:
        due = self._cadence.step()
        return self._flight.answer.done() if self._flight is not None else due

    def _push(self, samples: int) -> None:
        begun = time.monotonic()
        sent = self._masters.read(self._segments)
        healthy = self._team.all(bool(torch.isfinite(sent).all()))
        self._cadence.restart()
        # One that diverged says so, and gets the anchor.
        head = self._head("push", samples=samples - self._samples if healthy else 0)
        moved = sent - self.anchor()
        payload = self._messages.encode(moved, self._call + 1, self.number, remember=True) if healthy else moved[:0]
        body = as_bytes(payload.cpu())
        self._meter.count("bytes_islands", len(body))
        self._flight = _Flight(self._calls.start(head, body), sent, healthy, samples, time.monotonic() - begun)

    def _head(self, kind: str, **more: Any) -> dict[str, Any]:
        about = {"run": self.run, "number": self.number, "place": self._team.place, "call": self._call + 1}
        return {"kind": kind, **about, "token": self._token, "step": self._step(), **more}

    def _land(self, flight: _Flight) -> Met:
        begun = time.monotonic()
        head, body = self._heard(flight.answer)
        self._call += 1
        self._flight, taken = None, head["kind"] == "taken"
        for store in self.stores.by_name.values():
            store.commit() if taken else store.rollback()
        self._samples = flight.samples
        if not self._team.same(head["version"]):
            # The server was started again between two ranks.
            self._renew(claim=None)
        else:
            self._set_out(head, body, flight.sent)
        if not flight.healthy:
            self._diverged()
        reason = "" if taken else head.get("reason", "what it had moved was too old, or not finite")
        kind, weight = ("exchange" if taken else "renewed"), float(head.get("weight", 1.0))
        return Met(kind, flight.seconds + time.monotonic() - begun, self.version, reason=reason, weight=weight)

    def _heard(self, answer: "Future[Said]") -> Said:
        """Errors are those of all ranks of the island."""
        error = answer.exception()
        texts = [text for text in self._team.gather(None if error is None else f"{error}") if text]
        if error is not None:
            raise error
        if texts:
            raise CompressError(texts[0])
        return answer.result()

    def _set_out(self, head: Mapping[str, Any], body: Any, sent: Tensor | None) -> None:
        """From the anchor that has come. `sent`: masters keep what they have moved since they were so."""
        if not head.get("exact"):
            payload = read_bytes(body, torch.uint8).to(self._masters.device)
            anchor = self.anchor().add_(self._messages.decode(payload, self._call))
        else:
            anchor = read_bytes(body, torch.float32).to(self._masters.device, copy=True)
        if sent is not None:
            self._compare(sent, anchor, float(head["weight"]))
        self._anchor.write(self._segments, anchor)
        if sent is not None:
            since = self._masters.read(self._segments).sub_(sent)
            anchor = torch.where(torch.isfinite(since), since, 0.0).add_(anchor)
        self._masters.write(self._segments, anchor)
        self._masters.publish()
        self.version = head["version"]

    def _compare(self, sent: Tensor, anchor: Tensor, weight: float) -> None:
        """With what others have moved since; a momentum of all says nothing of them."""
        outer, before = self.settings.outer, self.anchor()
        if 0 < weight < 1 and outer.optimizer == "average":
            self._meter.islands_cosine = likeness(sent - before, anchor - before, weight * outer.lr)

    def _renew(self, claim: int | None, loaded: bool = False) -> Mapping[str, Any]:
        """Take the anchor as it is. `claim`: where nobody has trained yet, propose the own weights, or the anchor that
        was `loaded`, as that version; None: they are nothing new."""
        while True:
            head, body = self._ask("fresh")
            # Of some ranks alone, where the server was started again between them.
            found = not self._team.all(head["kind"] != "found")
            if found or claim:
                proposed = self.anchor() if loaded else self._masters.read(self._segments)
                layout = [(one.parameter, one.begin, one.numel) for one in self._segments]
                shapes = {name: list(self._parameters.shapes[name]) for name, _, _ in layout}
                more = {"claim": claim or 0, "layout": layout, "shapes": shapes}
                head, body = self._ask("seed", as_bytes(proposed.cpu()), **more)
            if self._team.same(head["version"]):
                self._set_out(head, body, None)
                return head
            # The server was started again between two ranks: it may be on its way still.
            time.sleep(_PAUSE)

    def _ask(self, kind: str, body: Any = b"", **more: Any) -> Said:
        """A call that all ranks wait for."""
        found = self._heard(self._calls.start(self._head(kind, **more), body))
        self._call += 1
        return found
