"""Exchange between islands: each sends the update of its fp32 master weights, and all apply the mean.

Every rank exchanges its own share of the master weights with the ranks of equal place in the other islands. All islands
hold the same `anchor`, the weights of their last agreement, and a rank sends the difference of its master weights to
it. The mean is a pseudo-gradient for the anchor (Local SGD, arXiv:1805.09767; DiLoCo, arXiv:2311.08105, algorithm 1;
with several fragments and a delay, Streaming DiLoCo, arXiv:2501.18512). This module is independent of DeepSpeed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition, cut
from deepspeed_compress.collectives.payload import PayloadReducer, PendingMeans
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.collectives.reduction import Reductions, Site
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import CompressedGradients, Islands, Outer
from deepspeed_compress.config.places import BlockwiseGradients
from deepspeed_compress.local_sgd.moments import PendingMoments, SecondMoments

__all__ = [
    "ANCHOR",
    "MOMENTUM",
    "AnchorState",
    "IslandExchange",
    "MasterWeights",
    "Peers",
    "cosine_to_others",
    "move_anchor",
]

ANCHOR, MOMENTUM = "anchor", "outer_momentum"
"""Names of the fp32 stores that are equal on all islands."""
_PLAIN = BlockwiseGradients()
"""Placeholder settings, of which only the uncompressed reducer is used."""


class MasterWeights(Protocol):
    """Interface to the fp32 master weights that this rank updates, as one flat vector."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Return the segments of the vector, in order. They are the same on ranks of equal place."""

    @property
    def device(self) -> torch.device:
        """Return the device on which exchanges run."""

    def read(self, segments: Sequence[Segment]) -> Tensor:
        """Return a new flat fp32 tensor of the elements of `segments`, on the device of the exchange."""

    def write(self, segments: Sequence[Segment], values: Tensor) -> None:
        """Replace the elements of `segments`. The model's weights do not change before `publish`."""

    def publish(self) -> None:
        """Update the model's weights on all ranks of the island from the master weights. Collective in the island."""


@dataclass
class PendingExchange:
    """A fragment in progress.

    Attributes:
        partition: the fragment.
        begun: step at which it was sent.
        sent: master weights at that step.
        moved: the update that was sent, or the master weights if `plain`; later, the mean.
        healthy: number of islands whose master weights are finite.
        contributes: True if this island is one of them.
        count: handle of the sum that computes `healthy`.
        means: handle of the exchange; None if there is no other island.
        plain: True if master weights were sent, uncompressed, instead of updates.
        moments: handle of the exchange of second moments, if any.
    """

    partition: Partition
    begun: int
    sent: Tensor
    moved: Tensor
    healthy: Tensor
    contributes: bool
    count: dist.Work | None
    means: PendingMeans | None
    plain: bool
    moments: PendingMoments | None

    def send_back(self) -> None:
        """Start the second half of the exchange."""
        if self.count is not None:
            self.count.wait()
            self.count = None
        if self.means is not None:
            # Avoid a division by zero if no island is healthy.
            self.means.scale = 1.0 / max(1.0, float(self.healthy))
            self.means.send_back()

    def mean(self) -> Tensor:
        """Return the mean over the healthy islands: of master weights if `plain`, else of updates."""
        self.send_back()
        if self.means is not None:
            self.means.finish(self.moved)
        return self.moved


class Peers:
    """The ranks of equal place in the participating islands, which form the group of `site`, and their reducers.

    `fragments`: parts of `segments`, each partitioned over the ranks.
    """

    def __init__(self, settings: Islands, segments: Sequence[Segment], site: Site) -> None:
        self.group: ProcessGroup = site.groups.whole
        self.fragments = [_partition(run, self.group.size()) for run in cut(segments, settings.fragments)]
        exchange = settings.exchange
        self._settings = exchange if isinstance(exchange, CompressedGradients) else _PLAIN
        self._reductions, self._site = Reductions(site), site
        # Create all residual stores before a state is loaded.
        self._reducer(0, plain=False)

    def start_sum(self, values: Tensor) -> dist.Work | None:
        """Start to sum `values` over the ranks, in place and uncompressed. Return None if there is only one rank."""
        ranks = self.group.size()
        if ranks == 1:
            return None
        size = 2 * (ranks - 1) * values.nbytes // ranks
        self._site.run.meter.count(self._site.traffic, size)
        self._site.run.wait_to_send(size)
        return self.group.allreduce([values])

    def start(
        self, moved: Tensor, fragment: Partition, step: int, plain: bool = False, contributes: bool = True
    ) -> PendingMeans | None:
        """Start to sum `moved` over the ranks. Return None if there is only one rank.

        If not `contributes`, `moved` must be zeros, and the residuals of earlier exchanges stay unchanged.
        """
        if self.group.size() == 1:
            return None
        reducer = self._reducer(step, plain)
        return (reducer if contributes else reducer.without_feedback()).start_all_reduce(moved, fragment, 1.0)

    def _reducer(self, step: int, plain: bool) -> PayloadReducer:
        reduction = self._reductions.at(self._settings, step)
        reducer = reduction.plain if plain else reduction.compressed
        assert isinstance(reducer, PayloadReducer), f"islands exchange by {type(reducer).__name__}"
        return reducer


class AnchorState:
    """State that is equal on all islands: the anchor and the outer optimizer's momentum. Writes take effect at once."""

    def __init__(self, stores: ResidualStores) -> None:
        self.anchor = stores.get(ANCHOR, "fp32", scaled=False, transactional=False)
        self.momentum = stores.get(MOMENTUM, "fp32", scaled=False, transactional=False)

    def move(self, segments: Sequence[Segment], moved: Tensor, outer: Outer) -> Tensor:
        """Apply the `outer` optimizer to the mean update `moved`, store the new anchor, and return it."""
        anchor = self.anchor.read(segments, moved.device)
        if outer.optimizer == "average":
            anchor.add_(moved, alpha=outer.lr)
        else:
            momentum = self.momentum.read(segments, moved.device)
            move_anchor(anchor, moved, momentum, outer)
            self.momentum.write(segments, momentum)
        self.anchor.write(segments, anchor)
        return anchor


class IslandExchange:
    """Exchanges of one rank with a fixed set of islands.

    Args:
        settings: the section's `islands`.
        master_weights: fp32 master weights of this rank.
        site: the group of ranks of equal place, the residual stores and the counters.
        island: the ranks of this island.
        number: number of this island.
        moments: second moments of the optimizer, if they are exchanged.
        diverged: called when the master weights were reset to the anchor because some were not finite.
    """

    def __init__(
        self,
        settings: Islands,
        master_weights: MasterWeights,
        site: Site,
        island: ProcessGroup,
        number: int,
        moments: SecondMoments | None = None,
        diverged: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings, self.number = settings, number
        self._diverged = diverged
        self.stores: ResidualStores = site.stores
        self._weights, self._moments = master_weights, moments
        self._island = island
        self._clock: StepClock = site.run.clock
        self._meter = site.run.meter
        self._state = AnchorState(self.stores)
        self._peers = Peers(settings, master_weights.segments, site)
        self._group, self._fragments = self._peers.group, self._peers.fragments
        self._pending: list[PendingExchange] = []

    def start(self) -> None:
        """Start all islands from the master weights of the first one, with empty residuals. Collective."""
        for store in self.stores.by_name.values():
            store.clear()
        self._begin([fragment.segments for fragment in self._fragments])

    def complete(self) -> None:
        """Initialize the state that a loaded checkpoint lacks from the master weights of the first island. Collective.

        A checkpoint lacks it if that part was not exchanged at the time of saving.
        """
        holds = self._state.anchor.holds
        missing = [[one for one in fragment.segments if not holds([one])] for fragment in self._fragments]
        some = torch.tensor(float(any(missing)), device=self._weights.device)
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=self._island)
        if some:
            self._begin(missing)

    def _begin(self, parts: Sequence[Sequence[Segment]]) -> None:
        for segments in parts:
            weights = self._weights.read(segments)
            if self._group.size() > 1 and segments:
                dist.broadcast(weights, dist.get_global_rank(self._group, 0), group=self._group)
            self._weights.write(segments, weights)
            self._state.anchor.write(segments, weights)
        self._settle()
        self._weights.publish()

    def step_ended(self, step: int) -> None:
        """Send what is due after optimizer step `step` (counted from 1), and apply what has arrived."""
        self._clock.begin(step)
        warm, delay = step <= self.settings.warmup_steps, self.settings.delay
        for fragment in self._fragments if warm else self._due(step):
            self._pending.append(self._send(fragment, step, plain=warm or self._uncompressed))
        for pending in self._pending:
            if pending.begun + (delay + 1) // 2 <= step:
                pending.send_back()
        self._land([pending for pending in self._pending if warm or pending.begun + delay <= step])

    def finish(self) -> None:
        """Wait for the exchanges in progress and apply them, as before saving. Collective."""
        self._land(list(self._pending))

    def forget(self) -> None:
        """Wait for the exchanges in progress and discard them, as before loading. Collective."""
        for pending in self._pending:
            pending.mean()
            if pending.moments is not None:
                pending.moments.wait()
        self._pending.clear()

    def discard_unowned_means(self) -> None:
        """Discard the residuals of means that this rank does not own, after those of all owners were loaded."""
        means, rank = self.stores.by_name.get("means"), self._group.rank()
        if means is None:
            return
        own = [fragment.owned_by(rank) for fragment in self._fragments]
        values = [means.read(segments, self._weights.device) for segments in own]
        means.clear()
        for segments, kept in zip(own, values, strict=True):
            means.write(segments, kept)
        self._settle()

    @property
    def _uncompressed(self) -> bool:
        return self.settings.exchange.method == "none"

    def _due(self, step: int) -> list[Partition]:
        """Return the fragments that are due at `step`."""
        every, count = self.settings.sync_steps, len(self._fragments)
        assert every is not None, "a time is of elastic islands"
        return [one for turn, one in enumerate(self._fragments) if step % every == turn * every // count]

    def _send(self, fragment: Partition, step: int, plain: bool) -> PendingExchange:
        sent = self._weights.read(fragment.segments)
        moved = sent.clone() if plain else sent - self._state.anchor.read(fragment.segments, sent.device)
        healthy = self._is_healthy(sent)
        if not healthy:
            # An island that diverged sends zeros and continues with the result of the others.
            moved.zero_()
        contributes = bool(healthy)
        count = dist.all_reduce(healthy, group=self._group, async_op=True) if self._group.size() > 1 else None
        means = self._peers.start(moved, fragment, step, plain, contributes)
        # They are small compared to a fragment, so all of them are sent with the first one.
        sharing = self._moments if fragment is self._fragments[0] else None
        moments = sharing.start(self._peers.start_sum, float(contributes)) if sharing is not None else None
        return PendingExchange(fragment, step, sent, moved, healthy, contributes, count, means, plain, moments)

    def _is_healthy(self, weights: Tensor) -> Tensor:
        """Return 1.0 if all master weights of the island are finite, else 0.0. Equal on all its ranks."""
        healthy = torch.isfinite(weights).all().to(torch.float32)
        if self._island.size() > 1:
            dist.all_reduce(healthy, op=dist.ReduceOp.MIN, group=self._island)
        return healthy

    def _land(self, exchanges: Sequence[PendingExchange]) -> None:
        for pending in exchanges:
            self._take(pending)
            self._pending.remove(pending)
        if exchanges:
            self._settle()
            self._weights.publish()

    def _take(self, pending: PendingExchange) -> None:
        """Update the anchor. The master weights become the anchor plus their updates since the fragment was sent."""
        segments, mean = pending.partition.segments, pending.mean()
        if pending.moments is not None:
            pending.moments.wait()
        if not pending.healthy:
            return
        if pending.moments is not None:
            pending.moments.apply()
        target = self._target(pending, mean)
        now = self._weights.read(segments)
        since = now.sub_(pending.sent)
        # Exactly the target if there was no update since then, and also if master weights are not finite.
        self._weights.write(segments, torch.where(torch.isfinite(since), since, 0.0).add_(target))
        if not pending.contributes:
            self._heal()

    def _heal(self) -> None:
        """Replace non-finite master weights by the anchor in all fragments.

        A single non-finite weight would spoil the others again in the next step.
        """
        for fragment in self._fragments:
            now = self._weights.read(fragment.segments)
            anchor = self._state.anchor.read(fragment.segments, now.device)
            self._weights.write(fragment.segments, torch.where(torch.isfinite(now), now, anchor))
        self._diverged()

    def _target(self, pending: PendingExchange, mean: Tensor) -> Tensor:
        """Return the new anchor. A mean of master weights is used as it is if possible, which avoids rounding."""
        outer, segments = self._outer(pending), pending.partition.segments
        moved = mean - self._state.anchor.read(segments, mean.device) if pending.plain else mean
        if pending.healthy > 1:
            own = pending.sent - self._state.anchor.read(segments, mean.device)
            self._meter.islands_cosine = cosine_to_others(own, moved, 1 / float(pending.healthy))
        if pending.plain and outer.optimizer == "average" and outer.lr == 1.0:
            self._state.anchor.write(segments, mean)
            return mean
        return self._state.move(segments, moved, outer)

    def _outer(self, pending: PendingExchange) -> Outer:
        warm = pending.begun <= self.settings.warmup_steps
        return Outer() if warm else self.settings.outer

    def _settle(self) -> None:
        for store in self.stores.by_name.values():
            store.commit()


def cosine_to_others(own: Tensor, mean: Tensor, share: float) -> Callable[[], float]:
    """Return a function that computes the cosine of this rank's update `own` and the mean update of the other islands.

    `mean` includes `own` with weight `share`.
    """
    found = torch.nn.functional.cosine_similarity(own, mean - share * own, dim=0)
    return lambda: float(found)


def move_anchor(anchor: Tensor, moved: Tensor, momentum: Tensor, outer: Outer) -> Tensor:
    """Move `anchor` by Nesterov momentum of the mean update `moved`, and return it. Updates `momentum` too.

    As in torch.optim.SGD with `nesterov`: momentum = m momentum + moved, anchor += lr (moved + m momentum).
    """
    momentum.mul_(outer.momentum).add_(moved)
    return anchor.add_(moved.add(momentum, alpha=outer.momentum), alpha=outer.lr)


def _partition(segments: Sequence[Segment], islands: int) -> Partition:
    """Return `segments` in order, cut into near-equal runs for the ranks of equal place."""
    placed: list[Segment] = []
    for owner, run in enumerate(cut(segments, islands)):
        for segment in run:
            offset = sum((placed[-1].offset, placed[-1].numel)) if placed else 0
            placed.append(replace(segment, offset=offset, owner=owner))
    return Partition(tuple(placed), islands)
