"""Exchanges without rounds: an island pushes its update to a server and receives the newest anchor in return.

No island waits for another, and training continues while both messages are in flight.

The update, which is the difference of the fp32 master weights to the anchor that the island started from, is encoded as
in a round. Its error feedback is committed once the server has accepted it. The reply is the difference of the newest
anchor to the one that the server knows the island to hold. Both sides add the decoded reply, so the next difference
contains whatever this one left out, and replies need no residual. The master weights become the new anchor plus the
updates made since the push.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.collectives.reduction import Reductions
from deepspeed_compress.errors import CompressError
from deepspeed_compress.local_sgd.exchange import (
    ANCHOR,
    FramedMessages,
    as_bytes,
    cosine_to_others,
    read_bytes,
    write_anchor,
)
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.local_sgd.strategy import ExchangeContext, ExchangeResult, LeaderDecision, SyncInterval

_PAUSE = 0.1
"""Seconds to wait before ranks that received different versions ask again."""

Reply = tuple[Mapping[str, Any], bytes | bytearray | memoryview]
"""Head of a message, and the bytes of its body."""


@dataclass(frozen=True)
class PendingPush:
    """A push in progress.

    Attributes:
        answer: future of the reply.
        sent: master weights at the time of the push.
        healthy: True if they were finite.
        samples: total number of samples at that time.
        seconds: time that it took to send.
    """

    answer: "Future[Reply]"
    sent: Tensor
    healthy: bool
    samples: int
    seconds: float


class AsynchronousExchange:
    """The pushes and pulls of one rank.

    Args:
        context: the settings, the ranks, and the state of this rank.
        calls: connection of this rank to the server.
        terms: settings that must be equal on all islands.
        step: returns the step of the island's schedule.
    """

    def __init__(
        self, context: ExchangeContext, calls: PushClient, terms: Mapping[str, Any], step: Callable[[], int] = lambda: 0
    ) -> None:
        settings, alone = context.settings, context.reduction
        self.settings, self._weights, self._ranks = settings, context.master_weights, context.ranks
        self._timeout = context.elastic.timeout_seconds
        self._calls, self._terms, self._step, self._on_divergence = calls, terms, step, context.on_divergence
        self.stores, self._meter, self._parameters = alone.stores, alone.run.meter, alone.parameters
        self._segments = tuple(self._weights.segments)
        self._messages = FramedMessages(settings.exchange, self._segments, Reductions(alone))
        self._anchor = self.stores.get(ANCHOR, "fp32", scaled=False, transactional=False)
        self.run, self.number, self.version = "", -1, 0
        """The server's run, the number of this island, and the version of the anchor that it started from."""
        self._token = ""
        self._call, self._samples = 0, 0
        self._pending: PendingPush | None = None
        self._decision = LeaderDecision(context.ranks)
        self._interval = SyncInterval(settings.sync_steps, settings.sync_seconds)

    def start(self, samples: int = 0) -> Mapping[str, Any]:
        """Take the anchor, or propose this island's weights if there is none, and return the head of the reply.

        `samples` is the total number of samples so far. Collective in the island.
        """
        self._samples = samples
        head, _ = self._ranks.run_on_first(partial(self._calls.ask, {"kind": "enter", "terms": dict(self._terms)}))
        self.run, self.number, self._token = head["run"], head["number"], head["token"]
        return self._adopt_anchor(claim=0)

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """Resume after a checkpoint was loaded, and return the head of the reply (empty if the server knew the island).

        The master weights and the anchor must be loaded already. Collective in the island.

        Args:
            saved: result of `describe` at the time of saving; None for a checkpoint of weights only.
            steps: number of steps of the checkpoint.
            samples: total number of samples so far.
        """
        self._decision.take()
        if self._pending is not None:
            self._await_reply(self._pending.answer)
            self._call += 1
        self._pending, self._samples = None, samples
        head = {"kind": "resume", "saved": saved or {"run": "", "number": -1}}
        answer, _ = self._ranks.run_on_first(partial(self._calls.ask, head))
        kind = answer["kind"]
        if kind == "resumed" and saved is not None:
            self.number, self._call, self.version = saved["number"], saved["call"], saved["version"]
            self._samples, self._token = saved["samples"], answer["token"]
            self._interval.resume(saved.get("interval"))
            return {}
        # The server has accepted what was sent since then, or it was lost with the old server.
        for name, store in self.stores.by_name.items():
            if name != ANCHOR:
                store.clear()
        if kind == "newest":
            return self._adopt_anchor(claim=None)
        return self._adopt_anchor(claim=max(1, steps) if saved is None else saved["version"], loaded=saved is not None)

    def describe(self) -> dict[str, Any]:
        """Return the state that `resume` needs."""
        about = {"run": self.run, "number": self.number, "call": self._call}
        return {**about, "version": self.version, "samples": self._samples, "interval": self._interval.describe()}

    def step_ended(self, samples: int) -> ExchangeResult | None:
        """Push if it is time, or apply a reply that has arrived.

        Called after an optimizer step. Collective in the island. `samples` is the total number of samples so far.
        Raises IslandError if the server has not replied for `give_up`.
        """
        is_due = self._interval.count_step() and self._pending is None
        asked = self._interval.has_elapsed() if self._pending is None else self._pending.answer.done()
        if not self._decision.follow(self._ranks.place == 0 and asked, is_due):
            return None
        if self._pending is not None:
            return self._apply_reply(self._pending)
        self._push(samples)
        return None

    def finish(self, patience: float) -> ExchangeResult | None:
        """Apply a pending reply if it arrives within `patience` seconds, as before saving.

        Collective in the island.
        """
        pending = self._pending
        if pending is None:
            return None
        deadline = time.monotonic() + patience
        while not pending.answer.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._apply_reply(pending) if self._ranks.all_true(pending.answer.done()) else None

    def prepare_save(self) -> None:
        """Wait up to `timeout` for a pending push. If it is still pending, it is saved as if it had not been sent."""
        self.finish(self._timeout)

    def prepare_load(self) -> None:
        """Do nothing: loading does not change the server's state."""

    def leave(self) -> None:
        """Announce that the island leaves, and end all calls. Does not wait for an unresponsive server."""
        entered = self._token and self._ranks.place == 0
        own = {"kind": "leave", "number": self.number, "token": self._token}
        self._calls.close(own if entered else None)

    def anchor(self) -> Tensor:
        """Return a copy of the anchor that this rank started from, as flat fp32."""
        return self._anchor.read(self._segments, self._weights.device)

    def _push(self, samples: int) -> None:
        begun = time.monotonic()
        sent = self._weights.read(self._segments)
        healthy = self._ranks.all_true(bool(torch.isfinite(sent).all()))
        self._interval.restart()
        # An island that diverged reports so, and receives the anchor.
        head = self._head("push", samples=samples - self._samples if healthy else 0)
        update = sent - self.anchor()
        payload = self._messages.encode(update, self._call + 1, self.number, remember=True) if healthy else update[:0]
        body = as_bytes(payload.cpu())
        self._meter.count("bytes_islands", len(body))
        self._pending = PendingPush(self._calls.start(head, body), sent, healthy, samples, time.monotonic() - begun)

    def _head(self, kind: str, **more: Any) -> dict[str, Any]:
        about = {"run": self.run, "number": self.number, "place": self._ranks.place, "call": self._call + 1}
        return {"kind": kind, **about, "token": self._token, "step": self._step(), **more}

    def _apply_reply(self, pending: PendingPush) -> ExchangeResult:
        begun = time.monotonic()
        # Outside of a step, the first rank may just have told the others that this reply has arrived.
        self._decision.take()
        head, body = self._await_reply(pending.answer)
        self._call += 1
        self._pending, is_taken = None, head["kind"] == "taken"
        for store in self.stores.by_name.values():
            store.commit() if is_taken else store.rollback()
        self._samples = pending.samples
        if not self._ranks.all_equal(head["version"]):
            # The server was restarted between the calls of two ranks.
            self._adopt_anchor(claim=None)
        else:
            self._start_from(head, body, pending.sent)
        if not pending.healthy:
            self._on_divergence()
        reason = "" if is_taken else head.get("reason", "its push was too old, or not finite")
        kind, weight = ("exchange" if is_taken else "renewed"), float(head.get("weight", 1.0))
        return ExchangeResult(
            kind, pending.seconds + time.monotonic() - begun, self.version, reason=reason, weight=weight
        )

    def _await_reply(self, answer: "Future[Reply]") -> Reply:
        """Return the reply. An error on one rank is raised on all ranks of the island."""
        error = answer.exception()
        texts = [text for text in self._ranks.gather(None if error is None else f"{error}") if text]
        if error is not None:
            raise error
        if texts:
            raise CompressError(texts[0])
        return answer.result()

    def _start_from(self, head: Mapping[str, Any], body: Any, sent: Tensor | None) -> None:
        """Continue from the anchor in the reply; with `sent`, keep later updates of the master weights."""
        if not head.get("exact"):
            payload = read_bytes(body, torch.uint8).to(self._weights.device)
            anchor = self.anchor().add_(self._messages.decode(payload, self._call))
        else:
            anchor = read_bytes(body, torch.float32).to(self._weights.device, copy=True)
        if sent is None:
            self._weights.write(self._segments, anchor)
        else:
            self._compare(sent, anchor, float(head["weight"]))
            write_anchor(self._weights, self._segments, anchor, sent)
        self._anchor.write(self._segments, anchor)
        self._weights.publish()
        self.version = head["version"]

    def _compare(self, sent: Tensor, anchor: Tensor, weight: float) -> None:
        """Record the similarity of this island's update to that of the others.

        Skipped with outer momentum, because the anchor's movement then does not represent the updates of the others.
        """
        outer, before = self.settings.outer, self.anchor()
        if 0 < weight < 1 and outer.optimizer == "average":
            self._meter.islands_cosine = cosine_to_others(sent - before, anchor - before, weight * outer.lr)

    def _adopt_anchor(self, claim: int | None, loaded: bool = False) -> Mapping[str, Any]:
        """Take the anchor as it is.

        Args:
            claim: version to propose if no island has trained yet; None if this island's weights are nothing new.
            loaded: propose the loaded anchor in place of this rank's weights.
        """
        while True:
            head, body = self._ask("fresh")
            # Only some ranks have no anchor if the server was restarted between their calls.
            found = not self._ranks.all_true(head["kind"] != "found")
            if found or claim:
                proposed = self.anchor() if loaded else self._weights.read(self._segments)
                layout = [(segment.parameter, segment.begin, segment.numel) for segment in self._segments]
                shapes = {name: list(self._parameters.shapes[name]) for name, _, _ in layout}
                more = {"claim": claim or 0, "layout": layout, "shapes": shapes}
                head, body = self._ask("seed", as_bytes(proposed.cpu()), **more)
            if self._ranks.all_equal(head["version"]):
                self._start_from(head, body, None)
                return head
            # The server was restarted between the calls of two ranks, and may still be starting.
            time.sleep(_PAUSE)

    def _ask(self, kind: str, body: Any = b"", **more: Any) -> Reply:
        """Send a request and wait for the reply on all ranks."""
        found = self._await_reply(self._calls.start(self._head(kind, **more), body))
        self._call += 1
        return found
