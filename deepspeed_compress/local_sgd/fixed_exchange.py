"""Exchanges among the fixed islands of one job, in fragments and with a delay (Streaming DiLoCo, arXiv:2501.18512)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import Outer
from deepspeed_compress.local_sgd.exchange import LocalSGDExchange, Peers, PendingExchange, Share, write_anchor
from deepspeed_compress.local_sgd.strategy import ExchangeContext


class FixedExchange:
    """Exchanges of one rank with a fixed set of islands.

    Args:
        context: the settings, the ranks of this island, and the state of this rank. Its reductions are over the ranks
            of equal place.
        number: number of this island.
    """

    def __init__(self, context: ExchangeContext, number: int) -> None:
        self.settings, self.number, reduction = context.settings, number, context.reduction
        self.stores, self._clock = reduction.stores, reduction.run.clock
        self._weights, self._moments = context.master_weights, context.moments
        self._on_divergence, self._ranks = context.on_divergence, context.ranks
        self._exchange = LocalSGDExchange(reduction.stores, reduction.run.meter)
        self._anchor = self._exchange.anchor
        self._peers = Peers(context.settings, context.master_weights.segments, reduction)
        self._pending: list[PendingExchange] = []

    def start(self) -> None:
        """Start all islands from the master weights of the first one, with empty residuals. Collective."""
        for store in self.stores.by_name.values():
            store.clear()
        self._start_from_first([fragment.segments for fragment in self._peers.fragments])

    def complete(self) -> None:
        """Initialize the state that a loaded checkpoint lacks from the master weights of the first island. Collective.

        A checkpoint lacks it if that part was not exchanged at the time of saving.
        """
        has_anchor = self._anchor.holds
        missing = [
            [segment for segment in fragment.segments if not has_anchor([segment])]
            for fragment in self._peers.fragments
        ]
        if not self._ranks.all_true(not any(missing)):
            self._start_from_first(missing)

    def step_ended(self, step: int) -> None:
        """Send what is due after optimizer step `step` (counted from 1), and apply what has arrived."""
        self._clock.begin(step)
        is_warm_up, delay = step <= self.settings.warmup_steps, self.settings.delay
        every, fragments = self.settings.sync_steps, self._peers.fragments
        assert every is not None, "only elastic islands have an interval in seconds"
        for turn, fragment in enumerate(fragments):
            if is_warm_up or step % every == turn * every // len(fragments):
                self._pending.append(self._send(fragment, step, is_warm_up))
        for pending in self._pending:
            if pending.step + (delay + 1) // 2 <= step:
                pending.send_back()
        self._apply([pending for pending in self._pending if is_warm_up or pending.step + delay <= step])

    def finish(self) -> None:
        """Wait for the exchanges in progress and apply them, as before saving. Collective."""
        self._apply(list(self._pending))

    def discard(self) -> None:
        """Wait for the exchanges in progress and discard them, as before loading. Collective."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def discard_unowned_means(self) -> None:
        """Discard the residuals of means that this rank does not own, after those of all owners were loaded."""
        means, rank = self.stores.by_name.get("means"), self._peers.group.rank()
        if means is None:
            return
        own = [fragment.owned_by(rank) for fragment in self._peers.fragments]
        values = [means.read(segments, self._weights.device) for segments in own]
        means.clear()
        for segments, kept in zip(own, values, strict=True):
            means.write(segments, kept)
        self._commit()

    def _send(self, fragment: Partition, step: int, is_warm_up: bool) -> PendingExchange:
        segments, group = fragment.segments, self._peers.group
        sent = self._weights.read(segments)
        # The ranks of this island agree whether all master weights are finite.
        healthy = torch.isfinite(sent).all().to(torch.float32)
        if self._ranks.group is not None and self._ranks.group.size() > 1:
            dist.all_reduce(healthy, op=dist.ReduceOp.MIN, group=self._ranks.group)
        is_healthy = bool(healthy)
        count = dist.all_reduce(healthy, group=group, async_op=True) if group.size() > 1 else None
        share = Share(is_healthy, float(is_healthy), healthy, count)
        is_plain = is_warm_up or self.settings.exchange.method == "none"
        pending = self._exchange.send(self._peers, fragment, segments, step, sent, share, has_weights=is_plain)
        if self._moments is not None and fragment is self._peers.fragments[0]:
            # They are small compared to a fragment, so all of them are sent with the first one.
            pending.moments = self._moments.start(self._peers.start_sum, share.weight)
        return pending

    def _apply(self, ended: Sequence[PendingExchange]) -> None:
        """Move the anchor. Master weights become the anchor plus their updates since the fragment was sent."""
        for pending in ended:
            update = self._exchange.receive(pending)
            if pending.share.islands:
                if pending.moments is not None:
                    pending.moments.apply()
                outer = Outer() if pending.step <= self.settings.warmup_steps else self.settings.outer
                anchor = self._exchange.apply(pending, update, outer)
                write_anchor(self._weights, pending.segments, anchor, pending.sent)
                if not pending.share.is_healthy:
                    self._reset_non_finite()
            self._pending.remove(pending)
        if ended:
            self._commit()
            self._weights.publish()

    def _reset_non_finite(self) -> None:
        """Replace non-finite master weights by the anchor in all fragments.

        A single non-finite weight would spoil the others again in the next step.
        """
        for fragment in self._peers.fragments:
            now = self._weights.read(fragment.segments)
            anchor = self._anchor.read(fragment.segments, now.device)
            self._weights.write(fragment.segments, torch.where(torch.isfinite(now), now, anchor))
        self._on_divergence()

    def _start_from_first(self, parts: Sequence[Sequence[Segment]]) -> None:
        group = self._peers.group
        for segments in parts:
            weights = self._weights.read(segments)
            if group.size() > 1 and segments:
                dist.broadcast(weights, dist.get_global_rank(group, 0), group=group)
            self._weights.write(segments, weights)
            self._anchor.write(segments, weights)
        self._commit()
        self._weights.publish()

    def _commit(self) -> None:
        for store in self.stores.by_name.values():
            store.commit()
