"""Exchanges between islands that come and go: who takes part is settled anew for each, and it counts for all or none.

An island is a job of its own. In a round every rank meets the ranks of equal place in the other islands, in a group
that is made for them, and kept as long as the same islands meet. An exchange changes nothing but memories that can be
rolled back; when all have voted and the coordinator has said that the round counts, everybody moves the anchor. Who was
away takes it from an island that has it.
"""

import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Condition
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.anchors import AnchorCopy, Handed, fetch_anchor
from deepspeed_compress.communication.islands import ANCHOR, MOMENTUM, Agreed, Masters, Peers, likeness
from deepspeed_compress.communication.moments import Moments, Shared
from deepspeed_compress.communication.reduction import Groups, Site
from deepspeed_compress.communication.team import Cadence, Team
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import IslandError
from deepspeed_compress.services.rendezvous.wire import Anchor, Outcome, Round

__all__ = ["ElasticExchange", "Met", "Rendezvous", "group_of_one", "make_groups"]

T = TypeVar("T")

VAIN = 5
"""Void rounds in a row that say something of the network, and not of islands that have died."""


class Rendezvous(Protocol):
    """What rank 0 of an island asks the coordinator: see `rendezvous.client.Client`."""

    run: str | None
    number: int
    opened: bool

    def sources(self) -> Anchor: ...
    def claim(self, run: str, number: int, version: int) -> Anchor: ...
    def ready(self, version: int) -> None: ...
    def arrive(self, samples: int) -> Round | Anchor | None: ...
    def vote(self, round_: int, ok: bool) -> Outcome: ...


@dataclass(frozen=True)
class Met:
    """What became of an exchange. `kind`: "exchange", "renewed" (was away, and has the newest anchor now), "void" or
    "left_out". `seconds`: that training stood still. `round`, `islands`: 0 where there was none. `weight`: of what was
    sent, against that of an island alone; known of asynchronous ones. `about`: what was handed out beside the anchor of
    another beginning."""

    kind: str
    seconds: float
    round: int = 0
    islands: int = 0
    reason: str = ""
    weight: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)


def group_of_one() -> ProcessGroup:
    """A group in which nothing travels."""
    return _gloo(HashStore(), 0, 1, 1.0)


def _gloo(store: Store, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Not known to torch.distributed, so that it may end at any time; it has all that exchanges use of a group."""
    return cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))


def _short(error: Exception) -> str:
    """What gloo says, without the place in its source and advice."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
    return text or type(error).__name__


def make_groups(round_: Round, place: int, number: int, timeout: float) -> Groups:
    """Those of the ranks at `place` in the islands of `round_`. RuntimeError where one is missing for `timeout`."""
    rank, size = round_.place(number), len(round_.partners)
    if size == 1:
        return Groups(group_of_one())
    host, _, port = round_.partners[0].store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    up, down = (
        _gloo(PrefixStore(f"{round_.fresh}/{place}/{way}", store), rank, size, timeout) for way in ("up", "down")
    )
    return Groups(up, downward=down)


@dataclass
class _Standing:
    """Groups that stand since round `round`, for `numbers`."""

    peers: Peers
    numbers: tuple[int, ...]
    round: int


@dataclass
class _Patience:
    """Seconds that a message of an exchange may take, from `least` to `most`. A link may need longer for one than
    islands wait for a sign of life, which nobody knows before: a round that is void doubles them, and one that counts
    says what it took."""

    least: float
    most: float

    def __post_init__(self) -> None:
        self.seconds = self.least

    def learn(self, committed: bool, took: float) -> None:
        self.seconds = min(max(self.least, 2 * took) if committed else 2 * self.seconds, self.most)


@dataclass(frozen=True)
class _Mean:
    """Over the islands of a round: how far they have `moved`, and second moments, where they are exchanged."""

    moved: Tensor
    moments: Shared | None


class ElasticExchange:
    """The exchanges of one rank with whatever islands there are.

    Args:
        settings: the section's `islands`, with `elastic`.
        masters: of this rank.
        site: of groups, what is exchanged in.
        team: the ranks of this island.
        rendezvous: on the first rank; None on the others.
        groups: makes them.
        about: what is handed out beside an anchor.
        moments: of the optimizer, where they are exchanged.
        diverged: is called when the masters are those of the others again, after some were not finite.
    """

    def __init__(
        self,
        settings: Islands,
        masters: Masters,
        site: Callable[[Groups], Site],
        team: Team,
        rendezvous: Rendezvous | None,
        groups: Callable[[Round, int, int, float], Groups] = make_groups,
        about: Callable[[], Mapping[str, Any]] = dict,
        moments: Moments | None = None,
        diverged: Callable[[], object] = lambda: None,
    ) -> None:
        assert settings.elastic is not None, "made for elastic islands"
        self.settings, self.elastic = settings, settings.elastic
        alone = site(Groups(group_of_one()))
        self.stores, self._clock, self._meter = alone.stores, alone.run.clock, alone.run.meter
        self.version = 0
        """Of the anchor that this island has; 0: none yet."""
        self.number = -1
        """Of this island among all that ever came: nobody else has had it."""
        self.run = ""
        """That the coordinator is of."""
        self._masters, self._site, self._team = masters, site, team
        self._rendezvous, self._make_groups, self._about = rendezvous, groups, about
        self._moments, self._diverged = moments, diverged
        self._segments = tuple(masters.segments)
        self._agreed = Agreed(self.stores)
        self._handed = {ANCHOR: self._agreed.anchor}
        if settings.outer.optimizer == "nesterov":
            self._handed[MOMENTUM] = self._agreed.momentum
        # All memories are there before a state is loaded.
        Peers(settings, self._segments, alone)
        self._standing: _Standing | None = None
        self._copy: weakref.ref[AnchorCopy] | None = None
        """The copy of the anchor that is being handed out, which all who ask share."""
        self._unreachable = "others have gone on between two ranks that asked"
        """Why the anchor could not be fetched last."""
        self._change = Condition()
        self._in_vain: list[float] = []
        self._cadence = Cadence(settings.sync_steps, settings.sync_seconds)
        self._patience = _Patience(self.elastic.timeout_seconds, self.elastic.give_up_seconds)

    def copy(self, version: int) -> Handed | None:
        """What an island that comes needs, as soon as it is at least of `version`; None where it does not become so. By
        any thread."""
        with self._change:
            if not self._change.wait_for(lambda: self.version >= max(1, version), self.elastic.timeout_seconds):
                return None
            found = self._copy() if self._copy is not None else None
            if found is None:
                device = torch.device("cpu")
                found = AnchorCopy({name: one.read(self._segments, device) for name, one in self._handed.items()})
                self._copy = weakref.ref(found)
            return self.version, {**self._about(), "run": self.run}, found

    def start(self) -> Mapping[str, Any]:
        """Take the anchor of those who are there, or begin with the own weights; what was handed out beside it.
        Collective in the island."""
        self.number, self.run = self._team.share(lambda: (self._asked.number, self._asked.run or ""))
        return self._renew(self._team.share(lambda: self._asked.sources()), own_is_new=True)

    def resume(self, run: str, number: int, version: int, own_is_new: bool) -> Mapping[str, Any]:
        """As `start`, with an anchor that island `number` of `run` has saved at `version`: all begin with the newest
        one, unless others have gone on meanwhile. `own_is_new`: it is the own weights. Collective in the island."""
        return self._renew(self._team.share(lambda: self._asked.claim(run, number, version)), own_is_new)

    def withdraw(self) -> None:
        """The anchor is about to be replaced: nobody gets a copy before `resume`."""
        with self._change:
            self.version, self._copy = 0, None

    def due(self) -> bool:
        """A step has ended; whether to exchange. On the first rank."""
        return self._cadence.step() or self._asked.opened

    def exchange(self, samples: int) -> Met:
        """Exchange what this island has moved by `samples` since it last did. Collective in the island.

        IslandError where the coordinator is away for `give_up`, or nothing comes of exchanges for as long.
        """
        begun = time.monotonic()
        sent = self._masters.read(self._segments)
        healthy = self._team.all(bool(torch.isfinite(sent).all()))
        found = self._team.share(lambda: self._asked.arrive(samples if healthy else 0))
        self._cadence.restart()
        met = self._meet(found, sent, healthy, begun)
        if not healthy and met.kind in ("exchange", "renewed"):
            self._diverged()
        return met

    def _meet(self, found: Round | Anchor | None, sent: Tensor, healthy: bool, begun: float) -> Met:
        if isinstance(found, Anchor):
            about = self._renew(found, own_is_new=False)
            if not self.version:
                return Met("left_out", time.monotonic() - begun, reason="the others have loaded checkpoints, and wait")
            reason = "what it had is of another beginning"
            return Met("renewed", time.monotonic() - begun, reason=reason, about=about)
        if found is None:
            return Met("left_out", time.monotonic() - begun, reason="too late for a round")
        together = time.monotonic()
        mean, problem = self._attempt(found, sent, healthy)
        kind = self._conclude(found, mean, problem)
        self._patience.learn(kind != "void", time.monotonic() - together)
        return Met(kind, time.monotonic() - begun, found.id, len(found.partners), problem)

    @property
    def _asked(self) -> Rendezvous:
        assert self._rendezvous is not None, "the first rank alone speaks for its island"
        return self._rendezvous

    def _attempt(self, round_: Round, sent: Tensor, healthy: bool) -> tuple[_Mean | None, str]:
        """Weighted means over the islands; None, and why, where somebody was lost."""
        try:
            return self._mean(round_, sent, healthy), ""
        except (RuntimeError, OSError) as error:
            # Also this rank's own: a round counts only where all have seen it through.
            return None, _short(error)

    def _mean(self, round_: Round, sent: Tensor, healthy: bool) -> _Mean:
        anchor = self._agreed.anchor.read(self._segments, sent.device)
        # An island that diverged counts for nothing, and goes on with what the others have found.
        moved = (sent - anchor).mul_(round_.weight(self.number)) if healthy else torch.zeros_like(sent)
        self._clock.begin(round_.id)
        peers = self._peers(round_)
        moments = self._share_moments(peers, round_, healthy)
        pending = peers.start(moved, peers.fragments[0], round_.id, counts=healthy, plain=self._uncompressed)
        if pending is not None:
            pending.scale = 1.0 / len(round_.partners)
            pending.finish(moved)
            own = (sent - anchor).mul_(round_.weight(self.number))
            self._meter.islands_cosine = likeness(own, moved, pending.scale)
        if moments is not None:
            moments.wait()
        return _Mean(moved, moments)

    def _share_moments(self, peers: Peers, round_: Round, healthy: bool) -> Shared | None:
        if self._moments is None:
            return None
        return self._moments.start(peers.add_up, round_.weight(self.number) if healthy else 0.0)

    @property
    def _uncompressed(self) -> bool:
        return self.settings.exchange.method == "none"

    def _peers(self, round_: Round) -> Peers:
        """The group of the last round where all have been in it, else a new one: all decide alike."""
        numbers, last = tuple(one.number for one in round_.partners), self._standing
        same = all(one.version == round_.base for one in round_.partners)
        if last is None or not same or last.numbers != numbers or last.round != round_.base:
            self._standing = None
            groups = self._make_groups(round_, self._team.place, self.number, self._patience.seconds)
            last = _Standing(Peers(self.settings, self._segments, self._site(groups)), numbers, round_.base)
        last.round = round_.id
        self._standing = last
        return last.peers

    def _conclude(self, round_: Round, mean: _Mean | None, problem: str) -> str:
        ok = self._team.all(mean is not None)
        outcome = self._team.share(partial(self._vote, round_.id, ok, problem))
        for store in self.stores.by_name.values():
            store.commit() if outcome.committed else store.rollback()
        if not outcome.committed:
            self._standing = None
            return "void"
        assert mean is not None, "it counts only where all have seen it through"
        if mean.moments is not None:
            mean.moments.apply()
        if self.version == round_.base:
            self._move(round_.id, mean.moved)
            return "exchange"
        self._renew(self._team.share(lambda: self._asked.sources()), own_is_new=False)
        return "renewed"

    def _vote(self, id_: int, ok: bool, problem: str) -> Outcome:
        outcome = self._asked.vote(id_, ok)
        self._in_vain = [] if outcome.committed else [*self._in_vain, time.monotonic()]
        if len(self._in_vain) > VAIN and self._in_vain[-1] - self._in_vain[0] > self.elastic.give_up_seconds:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: nothing has come of {len(self._in_vain)} exchanges in "
                f"{self.elastic.give_up} ({problem or 'others have failed'}). Islands must reach each other, not the "
                "coordinator alone: free the ports between them, or set GLOO_SOCKET_IFNAME. Where they do, and time "
                "out, the link is too slow for one exchange in that time: write a longer give_up, or fewer bits"
            )
        return outcome

    def _move(self, version: int, mean: Tensor) -> None:
        with self._change:
            target = self._agreed.move(self._segments, mean, self.settings.outer)
            self.version, self._copy = version, None
            self._change.notify_all()
        if self._team.place == 0:
            self._asked.ready(version)
        self._masters.write(self._segments, target)
        self._masters.publish()

    def _renew(self, anchor: Anchor, own_is_new: bool) -> Mapping[str, Any]:
        """Take `anchor`, or one that is newer, from whoever has it. Collective in the island."""
        deadline = time.monotonic() + self.elastic.give_up_seconds
        while anchor.sources:
            found = self._fetched(anchor)
            # A source may have gone on between two ranks that asked it.
            if self._team.same(0 if found is None else found[0]) and found is not None:
                self._take(*found)
                # It goes on while ranks ask, so that each may have heard another step.
                return self._team.share(partial(dict, found[1]))
            anchor = self._team.share(partial(self._next_anchor, anchor, deadline))
        self._keep(anchor.version, own_is_new)
        return {}

    def _next_anchor(self, anchor: Anchor, deadline: float) -> Anchor:
        if time.monotonic() > deadline:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: the anchor could not be taken from any of "
                f"{len(anchor.sources)} islands within {self.elastic.give_up} ({self._unreachable}); they must reach "
                "each other, not the coordinator alone"
            )
        return self._asked.sources()

    def _fetched(self, anchor: Anchor) -> Handed | None:
        """From one source after the other, each newcomer in an order of its own."""
        count, numel = len(anchor.sources), sum(segment.numel for segment in self._segments)
        sizes, timeout = dict.fromkeys(self._handed, numel), self.elastic.timeout_seconds
        for turn in range(count):
            addresses = anchor.sources[(self.number + turn) % count]
            try:
                return fetch_anchor(addresses[self._team.place], anchor.version, timeout, sizes, self.run)
            except OSError as error:
                self._unreachable = str(error) or type(error).__name__
        return None

    def _take(self, version: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        anchor = tensors[ANCHOR].to(self._masters.device)
        with self._change:
            for name, store in self._handed.items():
                store.write(self._segments, tensors[name].to(self._masters.device))
            self._have(version)
        self._masters.write(self._segments, anchor)
        self._masters.publish()

    def _keep(self, version: int, own_is_new: bool) -> None:
        """This island has the anchor already; `own_is_new`: it is its own weights, and nothing is remembered."""
        weights = self._masters.read(self._segments)
        with self._change:
            if own_is_new:
                for store in self.stores.by_name.values():
                    store.clear()
                self._agreed.anchor.write(self._segments, weights)
            self._have(version)

    def _have(self, version: int) -> None:
        self.version, self._copy = version, None
        self._change.notify_all()
        if self._team.place == 0:
            self._asked.ready(version)
