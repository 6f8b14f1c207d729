"""What the candidates of an adaptive choice would cost and lose: measured on a sample of a step's gradients."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.low_rank import LowRank, Matrix, find_matrices
from deepspeed_compress.communication.probes import link_seconds
from deepspeed_compress.communication.reduction import Parameters
from deepspeed_compress.config import GradientsConfig, MethodConfig, PowerSGDGradients, WeightsConfig
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.policy import Adaptive, AlphaBeta, Measurement, WeightCosts, fit, low_rank_error
from deepspeed_compress.session.trials import (
    MESSAGE,
    Trial,
    bytes_each,
    decode_seconds,
    encode_seconds,
    low_rank_seconds,
    try_messages,
    weighted,
)

__all__ = ["Prober", "WeightTraffic"]

PIECE = 4096
"""Elements of a sample that lie together."""
RATE = 32
"""One element in so many is in the sample; of small parameters more."""
SMALLEST, LARGEST = 2**18, 2**22
"""Bytes of the larger probe of a link."""
TICK = 1e-7
"""Seconds that a message takes at least."""
CLEAR = 3
"""Times as long as one of an eighth that it must take, or latency and other work on the machine hide the bandwidth."""
FASTER = 1.5
"""Times as fast as before that a link must seem to be measured again."""
PHASES = 4
"""Messages of factors that follow each other: of P and of Q, to their owners and back."""


@dataclass
class _Sample:
    """Of one group of parameters: pieces, how many elements each of theirs stands for, and how many elements this rank
    sends in the step."""

    pieces: list[Tensor] = field(default_factory=list)
    stands_for: list[float] = field(default_factory=list)
    sent: int = 0

    def joined(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The elements, flat fp32, and what each stands for."""
        if not self.pieces:
            return torch.zeros(0, device=device), torch.zeros(0, device=device)
        counts = torch.tensor([piece.numel() for piece in self.pieces], device=device)
        weights = torch.tensor(self.stands_for, dtype=torch.float32, device=device)
        return torch.cat(self.pieces), weights.repeat_interleave(counts)


@dataclass(frozen=True)
class _Seen:
    """A bucket of the step, as rank `rank` sends it: to its owners or `everywhere`."""

    partition: Partition
    rank: int
    everywhere: bool

    def sent(self, owner: int, numel: int) -> int:
        """Elements that this rank sends of a segment of `numel`."""
        return numel if owner != self.rank else numel * (self.partition.world_size - 1) * self.everywhere


@dataclass(frozen=True)
class WeightTraffic:
    """Weights that this rank has the masters of: elements in all, those that it sends to the others, elements that it
    decodes, and bytes of an uncompressed one. `overlap`: they travel while the next forward runs."""

    own: int = 0
    sent: int = 0
    decoded: int = 0
    itemsize: int = 4
    overlap: bool = False


class Prober:
    """Sees the buckets of a step, and measures when it is over. `everyone`: the ranks that decide alike; None for all
    of the job."""

    def __init__(
        self, adaptive: Adaptive, parameters: Parameters, device: torch.device, everyone: ProcessGroup | None = None
    ) -> None:
        self.weights = WeightTraffic()
        """Of weights whose settings are chosen."""
        self._adaptive = adaptive
        self._parameters = parameters
        self._device = device
        self._everyone = everyone
        self._samples = self._fresh()
        self._buckets: list[_Seen] = []
        self._last: AlphaBeta | None = None

    def _fresh(self) -> list[_Sample]:
        return [_Sample() for _ in range(len(self._adaptive.groups) + 1)]

    def see(self, bucket: Tensor, partition: Partition, rank: int, everywhere: bool) -> None:
        """Take a sample of `bucket`, which is about to be reduced, to its owners or `everywhere`."""
        seen = _Seen(partition, rank, everywhere)
        self._buckets.append(seen)
        for segment in partition.segments:
            sample = self._samples[self._group(segment.parameter)]
            sample.sent += seen.sent(segment.owner, segment.numel)
            count = max(1, segment.numel // (RATE * PIECE))
            stride = segment.numel // count
            for first in range(0, count * stride, max(1, stride)):
                piece = bucket.narrow(0, segment.offset + first, min(PIECE, stride)).to(torch.float32, copy=True)
                sample.pieces.append(piece)
                sample.stands_for.append(segment.numel / count / piece.numel())

    def _group(self, name: str) -> int:
        called = self._parameters.user_name(name)
        matches = (index for index, pattern in enumerate(self._adaptive.groups) if re.search(pattern, called))
        return next(matches, len(self._adaptive.groups))

    def forget(self) -> None:
        """The samples of a step that is not measured."""
        self._samples = self._fresh()
        self._buckets = []

    def measure(self, group: ProcessGroup, waited: float, step: float) -> Measurement:
        """What all ranks have seen in a step that took `step` seconds and `waited` for messages. Collective."""
        samples, buckets = self._samples, self._buckets
        self.forget()
        joined = [sample.joined(self._device) for sample in samples]
        sent = [sample.sent for sample in samples]
        norms = [weighted(x, weights) for x, weights in joined]
        tried = [self._try(settings, joined, sent, norms, buckets) for settings in self._adaptive.candidates]
        sums = self._reduced([waited, step, *norms, *(x for one in tried for x in (*one.errors, *one.sizes))], "SUM")
        count, world = len(samples), dist.get_world_size(self._everyone)
        rows = [sums[start : start + count] for start in range(2, len(sums), count)]
        return Measurement(
            errors=tuple(map(tuple, rows[1::2])),
            norms=tuple(rows[0]),
            sizes=tuple(tuple(size / world for size in row) for row in rows[2::2]),
            codec_seconds=tuple(self._reduced([one.seconds for one in tried], "MAX")),
            link=self._link(group),
            waited=sums[0] / world,
            step=sums[1] / world,
            waits=tuple(map(int, self._reduced([one.waits for one in tried], "MAX"))),
            weights=self._measure_weights(_few(joined), world),
        )

    def _try(
        self,
        settings: GradientsConfig,
        joined: Sequence[tuple[Tensor, Tensor]],
        sent: Sequence[int],
        norms: Sequence[float],
        buckets: Sequence[_Seen],
    ) -> Trial:
        if isinstance(settings, PowerSGDGradients):
            return self._try_low_rank(settings, _few(joined), norms, buckets)
        if not isinstance(settings, MethodConfig):
            return Trial([0.0] * len(sent), [float(self._itemsize * numel) for numel in sent], 0.0)
        tried = try_messages(settings.compressor(), joined, sent)
        # The error of one message says nothing of a momentum, and these methods have no other candidate beside them.
        return Trial([0.0] * len(sent), tried.sizes, tried.seconds) if settings.method in OWN_MOMENTUM else tried

    @property
    def _itemsize(self) -> int:
        return self._parameters.dtype.itemsize

    def _try_low_rank(
        self, settings: PowerSGDGradients, sample: Tensor, norms: Sequence[float], buckets: Sequence[_Seen]
    ) -> Trial:
        """Matrices by their factors, and the rest as it is."""
        raw = self._parameters.uncompressed(settings.min_numel)
        shapes = {name: shape for name, shape in self._parameters.shapes.items() if name not in raw}
        low_rank = LowRank(shapes, settings.rank)
        found = [(seen, find_matrices(seen.partition, low_rank)) for seen in buckets]
        segments = (segment for seen in buckets for segment in seen.partition.segments)
        numels = self._by_group((one.parameter, one.numel) for one in segments)
        approximated = self._by_group((one.name, one.whole.numel) for _, matrices in found for one in matrices)
        lost = low_rank_error(settings.rank) ** 2
        return Trial(
            [lost * norm * part / max(numel, 1) for norm, part, numel in zip(norms, approximated, numels, strict=True)],
            self._by_group(self._low_rank_bytes(found, bytes_each(settings.factor_compressor()))),
            low_rank_seconds(sample, settings.rank) * sum(approximated),
            PHASES * sum(bool(matrices) and seen.partition.world_size > 1 for seen, matrices in found),
        )

    def _low_rank_bytes(
        self, found: Sequence[tuple[_Seen, Sequence[Matrix]]], each: float
    ) -> Iterator[tuple[str, float]]:
        """By parameter, what this rank sends: of all-reduced factors of `each` bytes an element, and of the rest."""
        for seen, matrices in found:
            ranks, names = seen.partition.world_size, {matrix.name for matrix in matrices}
            for matrix in matrices:
                yield matrix.name, 2 * (ranks - 1) / ranks * each * matrix.rank * (matrix.rows + matrix.columns)
            for segment in seen.partition.segments:
                if segment.parameter not in names:
                    yield segment.parameter, float(self._itemsize * seen.sent(segment.owner, segment.numel))

    def _by_group(self, amounts: Iterable[tuple[str, float]]) -> list[float]:
        """Sums of (parameter, amount)."""
        totals = [0.0] * (len(self._adaptive.groups) + 1)
        for name, amount in amounts:
            totals[self._group(name)] += amount
        return totals

    def _measure_weights(self, sample: Tensor, world: int) -> WeightCosts:
        """Of all candidates; the time of a codec does not depend on what it encodes."""
        tried = [self._try_weights(settings, sample) for settings in self._adaptive.weights]
        sizes = self._reduced([size / world for size, _ in tried], "SUM")
        seconds = self._reduced([seconds for _, seconds in tried], "MAX")
        return WeightCosts(tuple(sizes), tuple(seconds), self.weights.overlap)

    def _try_weights(self, settings: WeightsConfig, sample: Tensor) -> tuple[float, float]:
        """Bytes and seconds of a step."""
        traffic = self.weights
        if not isinstance(settings, MethodConfig):
            return float(traffic.itemsize * traffic.sent), 0.0
        compressor = settings.compressor()
        if not traffic.sent or not sample.numel():
            return bytes_each(compressor) * traffic.sent, 0.0
        seconds = (
            encode_seconds(compressor, sample) * traffic.own + decode_seconds(compressor, sample) * traffic.decoded
        )
        return bytes_each(compressor) * traffic.sent, seconds

    def _link(self, group: ProcessGroup) -> AlphaBeta:
        """As `_probe`. A link may have saved up for it (token buckets, credits of a cloud), so one that seems faster is
        tried again. All ranks decide alike, by figures that are the same on all."""
        found = self._probe(group)
        if self._last is not None and found.bandwidth > FASTER * self._last.bandwidth:
            found = max(found, self._probe(group), key=lambda one: one.seconds_per_byte)
        self._last = found
        return found

    def _probe(self, group: ProcessGroup) -> AlphaBeta:
        """Latency and bandwidth of the link, the same on all ranks; nothing takes time where there is nobody else."""
        if group.size() == 1:
            return AlphaBeta(0.0, 0.0)
        large, seconds = SMALLEST // 4, [1.0, 1.0]
        while seconds[1] < CLEAR * seconds[0] and large < LARGEST:
            large *= 4
            sizes = [large // 8, large]
            measured = link_seconds(group, self._device, sizes)
            # A clock may not have moved.
            seconds = [max(one, TICK) for one in self._reduced(measured, "MAX")]
        return fit(sizes, seconds)

    def _reduced(self, values: Sequence[float], operation: str) -> list[float]:
        """Sum or maximum over all ranks that decide alike, those of other stages too."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=self._everyone)
        return list(tensor.tolist())


def _few(joined: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """As many elements of the samples as a message has."""
    return torch.cat([x for x, _ in joined])[:MESSAGE]
