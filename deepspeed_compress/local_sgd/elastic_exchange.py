"""Exchanges between islands that join and leave: each round has its own participants, and is committed by all or none.

An island is a separate job. In a round, every rank communicates with the ranks of equal place in the other islands, in
a group that is created for the round and reused as long as the participants stay the same. An exchange changes only
residual stores, which can be rolled back. Once all have voted and the coordinator has committed the round, every island
moves its anchor. An island that was away fetches the anchor from an island that has it.
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

from deepspeed_compress.collectives.reduction import Groups, Site
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import IslandError
from deepspeed_compress.local_sgd.anchors import AnchorCopy, VersionedAnchor, fetch_anchor
from deepspeed_compress.local_sgd.coordinator.wire import Anchor, Outcome, Round
from deepspeed_compress.local_sgd.exchange import ANCHOR, MOMENTUM, AnchorState, MasterWeights, Peers, cosine_to_others
from deepspeed_compress.local_sgd.island_ranks import IslandRanks, SyncInterval
from deepspeed_compress.local_sgd.moments import PendingMoments, SecondMoments

__all__ = ["ElasticExchange", "ExchangeResult", "Rendezvous", "group_of_one", "make_groups"]

T = TypeVar("T")

MAX_VOID_ROUNDS = 5
"""Number of consecutive void rounds that indicates a network problem rather than failed islands."""


class Rendezvous(Protocol):
    """Interface of rank 0 of an island to the coordinator; see `rendezvous.client.CoordinatorClient`."""

    run: str | None
    number: int
    is_awaited: bool

    def sources(self) -> Anchor: ...
    def claim(self, run: str, number: int, version: int) -> Anchor: ...
    def ready(self, version: int) -> None: ...
    def arrive(self, samples: int) -> Round | Anchor | None: ...
    def vote(self, round_: int, ok: bool) -> Outcome: ...


@dataclass(frozen=True)
class ExchangeResult:
    """Outcome of one exchange.

    Attributes:
        kind: "exchange", "renewed" (the island was away and now has the newest anchor), "void" or "left_out".
        seconds: time for which training was blocked.
        round: number of the round; 0 if there was none.
        islands: number of islands in the round; 0 if there was none.
        reason: explanation if the outcome is not "exchange".
        weight: weight of this island's update relative to that of a single island; only for asynchronous exchanges.
        about: metadata that came with the anchor of another run.
    """

    kind: str
    seconds: float
    round: int = 0
    islands: int = 0
    reason: str = ""
    weight: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)


def group_of_one() -> ProcessGroup:
    """Return a process group of one rank, which sends nothing."""
    return _gloo(HashStore(), 0, 1, 1.0)


def _gloo(store: Store, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Return a group that torch.distributed does not register, so that it may end at any time.

    It supports everything that exchanges use.
    """
    return cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))


def _short(error: Exception) -> str:
    """Return gloo's error message without its source location and advice."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
    return text or type(error).__name__


def make_groups(round_: Round, place: int, number: int, timeout: float) -> Groups:
    """Return the groups of the ranks at `place` in the islands of `round_`.

    Raises:
        RuntimeError: a rank is missing for `timeout` seconds.
    """
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
class _RoundPeers:
    """Groups of the islands `numbers` that were last used in round `round`."""

    peers: Peers
    numbers: tuple[int, ...]
    round: int


@dataclass
class _MessageTimeout:
    """Adaptive timeout in seconds for a message of an exchange, between `least` and `most`.

    A slow link may need longer for one message than the islands' liveness timeout, which is not known in advance. A
    void round doubles the timeout. A committed round sets it to twice the time that the round took.
    """

    least: float
    most: float

    def __post_init__(self) -> None:
        self.seconds = self.least

    def learn(self, committed: bool, took: float) -> None:
        self.seconds = min(max(self.least, 2 * took) if committed else 2 * self.seconds, self.most)


@dataclass(frozen=True)
class _RoundMeans:
    """Means over the islands of a round: of the updates (`moved`) and, if exchanged, of second moments."""

    moved: Tensor
    moments: PendingMoments | None


class ElasticExchange:
    """The exchanges of one rank with a changing set of islands.

    Args:
        settings: the section's `islands`, with `elastic`.
        master_weights: fp32 master weights of this rank.
        site: returns the residual stores and counters for given groups.
        ranks: the ranks of this island.
        rendezvous: connection to the coordinator on the first rank; None on the others.
        groups: creates the groups of a round.
        about: returns metadata that is sent along with an anchor.
        moments: second moments of the optimizer, if they are exchanged.
        diverged: called when the master weights equal the anchor again after some were not finite.
    """

    def __init__(
        self,
        settings: Islands,
        master_weights: MasterWeights,
        site: Callable[[Groups], Site],
        ranks: IslandRanks,
        rendezvous: Rendezvous | None,
        groups: Callable[[Round, int, int, float], Groups] = make_groups,
        about: Callable[[], Mapping[str, Any]] = dict,
        moments: SecondMoments | None = None,
        diverged: Callable[[], object] = lambda: None,
    ) -> None:
        assert settings.elastic is not None, "made for elastic islands"
        self.settings, self.elastic = settings, settings.elastic
        alone = site(Groups(group_of_one()))
        self.stores, self._clock, self._meter = alone.stores, alone.run.clock, alone.run.meter
        self.version = 0
        """Version of the anchor that this island has; 0 if it has none."""
        self.number = -1
        """Unique id of this island. Ids are never reused."""
        self.run = ""
        """Run of the coordinator."""
        self._weights, self._site, self._ranks = master_weights, site, ranks
        self._rendezvous, self._make_groups, self._about = rendezvous, groups, about
        self._moments, self._diverged = moments, diverged
        self._segments = tuple(master_weights.segments)
        self._state = AnchorState(self.stores)
        self._shared_stores = {ANCHOR: self._state.anchor}
        if settings.outer.optimizer == "nesterov":
            self._shared_stores[MOMENTUM] = self._state.momentum
        # Create all residual stores before a state is loaded.
        Peers(settings, self._segments, alone)
        self._last_round: _RoundPeers | None = None
        self._copy: weakref.ref[AnchorCopy] | None = None
        """Copy of the anchor that is being served, shared by all requests."""
        self._unreachable = "others have gone on between two ranks that asked"
        """Reason why the last attempt to fetch the anchor failed."""
        self._change = Condition()
        self._void_rounds: list[float] = []
        self._interval = SyncInterval(settings.sync_steps, settings.sync_seconds)
        self._message_timeout = _MessageTimeout(self.elastic.timeout_seconds, self.elastic.give_up_seconds)

    def copy(self, version: int) -> VersionedAnchor | None:
        """Return the state that a joining island needs, once the anchor is at least of `version`. Thread-safe.

        Returns None if that version is not reached within the timeout.
        """
        with self._change:
            if not self._change.wait_for(lambda: self.version >= max(1, version), self.elastic.timeout_seconds):
                return None
            found = self._copy() if self._copy is not None else None
            if found is None:
                device = torch.device("cpu")
                found = AnchorCopy(
                    {name: one.read(self._segments, device) for name, one in self._shared_stores.items()}
                )
                self._copy = weakref.ref(found)
            return self.version, {**self._about(), "run": self.run}, found

    def start(self) -> Mapping[str, Any]:
        """Fetch the anchor from another island, or propose this island's weights if there is none.

        Returns the metadata that came with the anchor, else an empty mapping. Collective in the island.
        """
        self.number, self.run = self._ranks.run_on_first(lambda: (self._asked.number, self._asked.run or ""))
        return self._adopt_anchor(self._ranks.run_on_first(lambda: self._asked.sources()), use_own_weights=True)

    def resume(self, run: str, number: int, version: int, use_own_weights: bool) -> Mapping[str, Any]:
        """Start with an anchor that island `number` of `run` saved at `version`. Collective in the island.

        All islands start with the newest saved anchor, unless other islands have continued meanwhile. With
        `use_own_weights`, the anchor is this island's own weights. Returns the same as `start`.
        """
        return self._adopt_anchor(
            self._ranks.run_on_first(lambda: self._asked.claim(run, number, version)), use_own_weights
        )

    def withdraw(self) -> None:
        """Stop serving copies until `resume`, because the anchor is about to be replaced."""
        with self._change:
            self.version, self._copy = 0, None

    def due(self) -> bool:
        """Count a finished step, and return True if an exchange is due. On the first rank only."""
        return self._interval.count_step() or self._asked.is_awaited

    def exchange(self, samples: int) -> ExchangeResult:
        """Exchange this island's update, made from `samples` samples since the last exchange. Collective in the island.

        Raises:
            IslandError: the coordinator is unreachable for `give_up`, or no exchange succeeds for as long.
        """
        begun = time.monotonic()
        sent = self._weights.read(self._segments)
        healthy = self._ranks.all_true(bool(torch.isfinite(sent).all()))
        found = self._ranks.run_on_first(lambda: self._asked.arrive(samples if healthy else 0))
        self._interval.restart()
        result = self._meet(found, sent, healthy, begun)
        if not healthy and result.kind in ("exchange", "renewed"):
            self._diverged()
        return result

    def _meet(self, found: Round | Anchor | None, sent: Tensor, healthy: bool, begun: float) -> ExchangeResult:
        if isinstance(found, Anchor):
            about = self._adopt_anchor(found, use_own_weights=False)
            if not self.version:
                return ExchangeResult(
                    "left_out", time.monotonic() - begun, reason="the others have loaded checkpoints, and wait"
                )
            reason = "what it had is of another beginning"
            return ExchangeResult("renewed", time.monotonic() - begun, reason=reason, about=about)
        if found is None:
            return ExchangeResult("left_out", time.monotonic() - begun, reason="too late for a round")
        together = time.monotonic()
        mean, problem = self._attempt(found, sent, healthy)
        kind = self._conclude(found, mean, problem)
        self._message_timeout.learn(kind != "void", time.monotonic() - together)
        return ExchangeResult(kind, time.monotonic() - begun, found.id, len(found.partners), problem)

    @property
    def _asked(self) -> Rendezvous:
        assert self._rendezvous is not None, "the first rank alone speaks for its island"
        return self._rendezvous

    def _attempt(self, round_: Round, sent: Tensor, healthy: bool) -> tuple[_RoundMeans | None, str]:
        """Return the weighted means over the islands, or None and the reason if the exchange failed."""
        try:
            return self._mean(round_, sent, healthy), ""
        except (RuntimeError, OSError) as error:
            # This includes errors of this rank: a round is committed only if all ranks completed it.
            return None, _short(error)

    def _mean(self, round_: Round, sent: Tensor, healthy: bool) -> _RoundMeans:
        anchor = self._state.anchor.read(self._segments, sent.device)
        # An island that diverged sends zeros and continues with the result of the others.
        moved = (sent - anchor).mul_(round_.weight(self.number)) if healthy else torch.zeros_like(sent)
        self._clock.begin(round_.id)
        peers = self._peers(round_)
        moments = self._share_moments(peers, round_, healthy)
        pending = peers.start(moved, peers.fragments[0], round_.id, contributes=healthy, plain=self._uncompressed)
        if pending is not None:
            pending.scale = 1.0 / len(round_.partners)
            pending.finish(moved)
            own = (sent - anchor).mul_(round_.weight(self.number))
            self._meter.islands_cosine = cosine_to_others(own, moved, pending.scale)
        if moments is not None:
            moments.wait()
        return _RoundMeans(moved, moments)

    def _share_moments(self, peers: Peers, round_: Round, healthy: bool) -> PendingMoments | None:
        if self._moments is None:
            return None
        return self._moments.start(peers.start_sum, round_.weight(self.number) if healthy else 0.0)

    @property
    def _uncompressed(self) -> bool:
        return self.settings.exchange.method == "none"

    def _peers(self, round_: Round) -> Peers:
        """Return the last round's group if all islands took part in it, else a new one. All decide alike."""
        numbers, last = tuple(one.number for one in round_.partners), self._last_round
        same = all(one.version == round_.base for one in round_.partners)
        if last is None or not same or last.numbers != numbers or last.round != round_.base:
            self._last_round = None
            groups = self._make_groups(round_, self._ranks.place, self.number, self._message_timeout.seconds)
            last = _RoundPeers(Peers(self.settings, self._segments, self._site(groups)), numbers, round_.base)
        last.round = round_.id
        self._last_round = last
        return last.peers

    def _conclude(self, round_: Round, mean: _RoundMeans | None, problem: str) -> str:
        ok = self._ranks.all_true(mean is not None)
        outcome = self._ranks.run_on_first(partial(self._vote, round_.id, ok, problem))
        for store in self.stores.by_name.values():
            store.commit() if outcome.committed else store.rollback()
        if not outcome.committed:
            self._last_round = None
            return "void"
        assert mean is not None, "it counts only where all have seen it through"
        if mean.moments is not None:
            mean.moments.apply()
        if self.version == round_.base:
            self._move(round_.id, mean.moved)
            return "exchange"
        self._adopt_anchor(self._ranks.run_on_first(lambda: self._asked.sources()), use_own_weights=False)
        return "renewed"

    def _vote(self, id_: int, ok: bool, problem: str) -> Outcome:
        outcome = self._asked.vote(id_, ok)
        self._void_rounds = [] if outcome.committed else [*self._void_rounds, time.monotonic()]
        if (
            len(self._void_rounds) > MAX_VOID_ROUNDS
            and self._void_rounds[-1] - self._void_rounds[0] > self.elastic.give_up_seconds
        ):
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: {len(self._void_rounds)} exchanges in a row failed "
                f"within {self.elastic.give_up} ({problem or 'other islands failed'}). Islands must reach each other, "
                "not only the coordinator: open the ports between them, or set GLOO_SOCKET_IFNAME. If they do, and "
                "exchanges time out, the link is too slow: write a longer give_up, or fewer bits"
            )
        return outcome

    def _move(self, version: int, mean: Tensor) -> None:
        with self._change:
            target = self._state.move(self._segments, mean, self.settings.outer)
            self.version, self._copy = version, None
            self._change.notify_all()
        if self._ranks.place == 0:
            self._asked.ready(version)
        self._weights.write(self._segments, target)
        self._weights.publish()

    def _adopt_anchor(self, anchor: Anchor, use_own_weights: bool) -> Mapping[str, Any]:
        """Take `anchor`, or a newer one, from an island that has it. Collective in the island."""
        deadline = time.monotonic() + self.elastic.give_up_seconds
        while anchor.sources:
            found = self._fetched(anchor)
            # A source may have moved on between the requests of two ranks.
            if self._ranks.all_equal(0 if found is None else found[0]) and found is not None:
                self._take(*found)
                # The source trains on during the requests, so ranks may have received metadata of different steps.
                return self._ranks.run_on_first(partial(dict, found[1]))
            anchor = self._ranks.run_on_first(partial(self._next_anchor, anchor, deadline))
        self._keep(anchor.version, use_own_weights)
        return {}

    def _next_anchor(self, anchor: Anchor, deadline: float) -> Anchor:
        if time.monotonic() > deadline:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: the anchor could not be taken from any of "
                f"{len(anchor.sources)} islands within {self.elastic.give_up} ({self._unreachable}); they must reach "
                "each other, not the coordinator alone"
            )
        return self._asked.sources()

    def _fetched(self, anchor: Anchor) -> VersionedAnchor | None:
        """Try one source after another, starting at a different one for each island."""
        count, numel = len(anchor.sources), sum(segment.numel for segment in self._segments)
        sizes, timeout = dict.fromkeys(self._shared_stores, numel), self.elastic.timeout_seconds
        for turn in range(count):
            addresses = anchor.sources[(self.number + turn) % count]
            try:
                return fetch_anchor(addresses[self._ranks.place], anchor.version, timeout, sizes, self.run)
            except OSError as error:
                self._unreachable = str(error) or type(error).__name__
        return None

    def _take(self, version: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        anchor = tensors[ANCHOR].to(self._weights.device)
        with self._change:
            for name, store in self._shared_stores.items():
                store.write(self._segments, tensors[name].to(self._weights.device))
            self._have(version)
        self._weights.write(self._segments, anchor)
        self._weights.publish()

    def _keep(self, version: int, use_own_weights: bool) -> None:
        """Keep the anchor of this island; with `use_own_weights`, its own weights become the anchor."""
        weights = self._weights.read(self._segments)
        with self._change:
            if use_own_weights:
                for store in self.stores.by_name.values():
                    store.clear()
                self._state.anchor.write(self._segments, weights)
            self._have(version)

    def _have(self, version: int) -> None:
        self.version, self._copy = version, None
        self._change.notify_all()
        if self._ranks.place == 0:
            self._asked.ready(version)
