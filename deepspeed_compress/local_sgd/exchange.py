"""One exchange between islands: each sends the update of its fp32 master weights, and all apply the mean.

Every rank exchanges its own share of the master weights with the ranks of equal place in the other islands. All islands
hold the same `anchor`, the weights of their last agreement, and a rank sends the difference of its master weights to
it, compressed and with error feedback. The mean is a pseudo-gradient for the anchor (Local SGD, arXiv:1805.09767;
DiLoCo, arXiv:2311.08105, algorithm 1). This module knows neither DeepSpeed nor which islands take part: a fixed set
(`fixed_exchange`), or those of a round (`elastic_exchange`). `FramedMessages` encode the same updates for processes
that share no process group (`asynchronous_exchange`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition, cut
from deepspeed_compress.collectives.messages import MessageLayout, Messages, make_layouts
from deepspeed_compress.collectives.payload import PayloadReducer, PendingMeans
from deepspeed_compress.collectives.reduction import ReductionContext, Reductions
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.segments import Segment, elements, scatter
from deepspeed_compress.config import CompressedGradients, GradientsConfig, Islands, Outer
from deepspeed_compress.config.places import BlockwiseGradients
from deepspeed_compress.local_sgd.moments import PendingMoments
from deepspeed_compress.monitor import Meter

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


@dataclass(frozen=True)
class Share:
    """Part that this island has in an exchange.

    Attributes:
        is_healthy: True if its master weights are finite. Otherwise it sends zeros and takes the result of the others.
        weight: factor of its update, 1 on average.
        islands: number of islands whose updates are averaged, as a float tensor; valid once `count` has ended.
        count: handle of the sum that computes `islands`; None if the number is known already.
    """

    is_healthy: bool
    weight: float
    islands: Tensor
    count: dist.Work | None = None


@dataclass(eq=False)
class PendingExchange:
    """An exchange in progress.

    Attributes:
        segments: the part of the master weights that is exchanged, as the anchor stores it.
        step: step at which it was sent.
        sent: master weights at that step.
        values: what was sent, the weighted update or the master weights themselves; after `wait`, the mean.
        share: the part of this island.
        means: handle of the exchange; None if there is no other island.
        has_weights: True if master weights were sent, uncompressed, instead of updates.
        moments: handle of the exchange of second moments, if any.
    """

    segments: Sequence[Segment]
    step: int
    sent: Tensor
    values: Tensor
    share: Share
    means: PendingMeans | None
    has_weights: bool
    moments: PendingMoments | None = None

    def send_back(self) -> None:
        """Start the second half of the exchange."""
        if self.share.count is not None:
            self.share.count.wait()
        if self.means is not None:
            # Avoid a division by zero if no island is healthy.
            self.means.scale = 1.0 / max(1.0, float(self.share.islands))
            self.means.send_back()

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the mean: of master weights if `has_weights`, else of updates."""
        self.send_back()
        if self.means is not None:
            self.means.finish(self.values)
        if self.moments is not None:
            self.moments.wait()
        return self.values


class Peers:
    """The ranks of equal place in the participating islands, and their reducers.

    They form the group of `reduction_context`.

    Attributes:
        group: the process group of these ranks.
        fragments: the parts of `segments` that are exchanged in turn, each partitioned over the ranks.
    """

    def __init__(self, settings: Islands, segments: Sequence[Segment], reduction_context: ReductionContext) -> None:
        self.group: ProcessGroup = reduction_context.groups.whole
        self.fragments = [_partition(run, self.group.size()) for run in cut(segments, settings.fragments)]
        self._settings = settings.exchange
        self._reductions, self._reduction_context = Reductions(reduction_context), reduction_context
        # Create all residual stores before a state is loaded.
        payload_reducer(self._reductions, self._settings, 0)

    def start_sum(self, values: Tensor) -> dist.Work | None:
        """Start to sum `values` over the ranks, in place and uncompressed. Return None if there is only one rank."""
        ranks = self.group.size()
        if ranks == 1:
            return None
        size = 2 * (ranks - 1) * values.nbytes // ranks
        self._reduction_context.run.meter.count(self._reduction_context.traffic, size)
        self._reduction_context.run.wait_to_send(size)
        return self.group.allreduce([values])

    def start(
        self, values: Tensor, fragment: Partition, step: int, plain: bool, contributes: bool
    ) -> PendingMeans | None:
        """Start to sum `values` over the ranks. Return None if there is only one rank.

        Args:
            values: flat fp32 vector of `fragment`; zeros unless this island `contributes`.
            fragment: the part of the master weights.
            step: number of the exchange.
            plain: send uncompressed whatever the method.
            contributes: add the residuals of earlier exchanges and store new ones.
        """
        if self.group.size() == 1:
            return None
        reducer = payload_reducer(self._reductions, self._settings, step, plain)
        return (reducer if contributes else reducer.without_feedback()).start_all_reduce(values, fragment, 1.0)


def payload_reducer(
    reductions: Reductions, settings: GradientsConfig, step: int, plain: bool = False
) -> PayloadReducer:
    """Return the reducer of exchange number `step`: without compression if `plain`, or if the method is "none".

    Raises:
        TypeError: the method does not send one message to each rank.
    """
    reduction = reductions.at(settings if isinstance(settings, CompressedGradients) else _PLAIN, step)
    reducer = reduction.plain if plain or settings.method == "none" else reduction.compressed
    if not isinstance(reducer, PayloadReducer):
        raise TypeError(f"{settings.method} does not go in one message (allowed: other methods, without hierarchy)")
    return reducer


class LocalSGDExchange:
    """One exchange of Local SGD and DiLoCo, with error feedback: send an update, receive the mean, move the anchor.

    Args:
        stores: residuals, anchor and momentum of this rank.
        meter: receives the similarity of the islands' updates.

    Attributes:
        anchor: store of the anchor, which is equal on all islands, as is the outer optimizer's momentum. Writes take
            effect at once.
    """

    def __init__(self, stores: ResidualStores, meter: Meter) -> None:
        self.anchor, self._momentum = (
            stores.get(name, "fp32", scaled=False, transactional=False) for name in (ANCHOR, MOMENTUM)
        )
        self._meter = meter

    def send(
        self,
        peers: Peers,
        fragment: Partition,
        segments: Sequence[Segment],
        step: int,
        sent: Tensor,
        share: Share,
        has_weights: bool = False,
    ) -> PendingExchange:
        """Start to exchange `sent`, the master weights of `fragment`, with `peers`.

        Args:
            peers: the ranks of the participating islands.
            fragment: the part of the master weights, partitioned over `peers`.
            segments: the same part, as the anchor stores it.
            step: number of the exchange.
            sent: master weights, flat fp32.
            share: the part of this island.
            has_weights: send the master weights themselves, uncompressed, instead of their update. Their mean needs
                no rounding.
        """
        values = sent.clone() if has_weights else self._update(sent, segments, share)
        if not share.is_healthy:
            # An island that diverged sends zeros and continues with the result of the others.
            values.zero_()
        means = peers.start(values, fragment, step, has_weights, share.is_healthy)
        return PendingExchange(segments, step, sent, values, share, means, has_weights)

    def receive(self, pending: PendingExchange) -> Tensor:
        """Wait for the islands, and return their mean update, flat fp32."""
        mean, share = pending.wait(), pending.share
        if pending.has_weights:
            mean = mean - self.anchor.read(pending.segments, mean.device)
        if share.islands > 1:
            own = self._update(pending.sent, pending.segments, share)
            self._meter.islands_cosine = cosine_to_others(own, mean, 1 / float(share.islands))
        return mean

    def apply(self, pending: PendingExchange, update: Tensor, outer: Outer) -> Tensor:
        """Apply the `outer` optimizer to the mean `update`, store the new anchor, and return it.

        Momentum is that of torch.optim.SGD with `nesterov`: momentum = m momentum + update, anchor += lr (update + m
        momentum). A mean of master weights is used as it is if possible, which avoids rounding.
        """
        segments = pending.segments
        if pending.has_weights and outer.optimizer == "average" and outer.lr == 1.0:
            anchor = pending.values
        else:
            anchor = self.anchor.read(segments, update.device)
            if outer.optimizer == "nesterov":
                momentum = self._momentum.read(segments, update.device).mul_(outer.momentum).add_(update)
                self._momentum.write(segments, momentum)
                update = update.add(momentum, alpha=outer.momentum)
            anchor.add_(update, alpha=outer.lr)
        self.anchor.write(segments, anchor)
        return anchor

    def _update(self, sent: Tensor, segments: Sequence[Segment], share: Share) -> Tensor:
        update = sent - self.anchor.read(segments, sent.device)
        return update if share.weight == 1.0 else update.mul_(share.weight)


def write_anchor(weights: MasterWeights, segments: Sequence[Segment], anchor: Tensor, sent: Tensor) -> None:
    """Replace master weights by `anchor` plus the updates that were made since they were `sent`.

    They become exactly `anchor` if there was no update since then, and also if they are not finite.
    """
    since = weights.read(segments).sub_(sent)
    weights.write(segments, torch.where(torch.isfinite(since), since, 0.0).add_(anchor))


def cosine_to_others(own: Tensor, mean: Tensor, share: float) -> Callable[[], float]:
    """Return a function that computes the cosine of this rank's update `own` and the mean update of the other islands.

    `mean` includes `own` with weight `share`.
    """
    found = torch.nn.functional.cosine_similarity(own, mean - share * own, dim=0)
    return lambda: float(found)


def _partition(segments: Sequence[Segment], islands: int) -> Partition:
    """Return `segments` in order, cut into near-equal runs for the ranks of equal place."""
    placed: list[Segment] = []
    for owner, run in enumerate(cut(segments, islands)):
        for segment in run:
            offset = sum((placed[-1].offset, placed[-1].numel)) if placed else 0
            placed.append(replace(segment, offset=offset, owner=owner))
    return Partition(tuple(placed), islands)


@dataclass(frozen=True)
class FramedMessages:
    """Encoder and decoder of flat fp32 vectors. Messages are numbered from 1, because codecs may differ between them.

    Attributes:
        settings: compression of the vectors.
        segments: the slices of parameters that make up a vector, in order.
        reductions: builder of reducers whose stores hold the residuals.
    """

    settings: GradientsConfig
    segments: Sequence[Segment]
    reductions: Reductions

    @property
    def exact(self) -> bool:
        """Return True if vectors are sent uncompressed."""
        return not isinstance(self.settings, CompressedGradients)

    def size(self, number: int) -> int:
        """Return the number of bytes of message `number`."""
        return self._message(number)[1].sizes[0]

    def encode(self, x: Tensor, number: int, sender: int, remember: bool) -> Tensor:
        """Return message number `number` of `sender`: uint8, on the device of `x`.

        Args:
            x: flat fp32 vector.
            number: number of the message, from 1.
            sender: number that is unique to the sender.
            remember: add the residuals of earlier messages to `x`, and store the new residuals.
        """
        messages, layout = self._message(number)
        payload = torch.empty(layout.sizes[0], dtype=torch.uint8, device=x.device)
        for piece in layout.pieces:
            channel, key = messages.channels[piece.channel], message_key((number, piece.channel), sender)
            found = channel.codec.coefficients(elements(x, piece.segments), piece.segments)
            out = payload[piece.begin : piece.end]
            if remember:
                channel.feedback.encode(found, piece.segments, out, key, channel.codec)
            else:
                channel.codec.compressor.compress(found, out, key)
        return payload

    def decode(self, payload: Tensor, number: int) -> Tensor:
        """Return the vector of message `number`: flat fp32. The size of `payload` must be right."""
        messages, layout = self._message(number)
        x = torch.zeros(sum(segment.numel for segment in self.segments), device=payload.device)
        for piece in layout.pieces:
            part, codec = x.new_empty(piece.numel), messages.channels[piece.channel].codec
            codec.decode([payload[piece.begin : piece.end]], piece.segments, part, 1.0)
            scatter(part, piece.segments, x)
        return x

    def _message(self, number: int) -> tuple[Messages, MessageLayout]:
        messages = payload_reducer(self.reductions, self.settings, number).messages
        return messages, make_layouts(messages, [self.segments], 0)[0]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, which is flat and on the host."""
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def read_bytes(body: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """Return the flat tensor in the memory of `body`."""
    return torch.frombuffer(body, dtype=dtype) if len(body) else torch.zeros(0, dtype=dtype)
