"""What the candidates of an adaptive choice would cost and lose: measured on a sample of a step's gradients."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.probes import link_seconds
from deepspeed_compress.compression.compressors import Compressor
from deepspeed_compress.config import GradientsConfig, MethodConfig
from deepspeed_compress.policy import Adaptive, AlphaBeta, Measurement, fit

__all__ = ["Prober"]

PIECE = 4096
"""Elements of a sample that lie together."""
RATE = 32
"""One element in so many is in the sample; of small parameters more."""
NUMEL = 2**20
"""Elements of the message by which sizes are told."""
SMALLEST, LARGEST = 2**18, 2**22
"""Bytes of the larger probe of a link."""
TICK = 1e-7
"""Seconds that a message takes at least."""
CLEAR = 3
"""Times as long as one of an eighth that it must take, or latency and other work on the machine hide the bandwidth."""


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
class _Trial:
    """Squared errors and bytes by group of parameters, and seconds of a step's encoding and decoding."""

    errors: list[float]
    sizes: list[float]
    seconds: float


class Prober:
    """Sees the buckets of a step, and measures when it is over.

    `user_name`: what users call a parameter. `itemsize`: bytes of an uncompressed element.
    """

    def __init__(
        self, adaptive: Adaptive, user_name: Callable[[str], str], itemsize: int, device: torch.device
    ) -> None:
        self._adaptive = adaptive
        self._user_name = user_name
        self._itemsize = itemsize
        self._device = device
        self._samples = self._fresh()

    def _fresh(self) -> list[_Sample]:
        return [_Sample() for _ in range(len(self._adaptive.groups) + 1)]

    def see(self, bucket: Tensor, partition: Partition, rank: int, everywhere: bool) -> None:
        """Take a sample of `bucket`, which is about to be reduced, to its owners or `everywhere`."""
        for segment in partition.segments:
            sample = self._samples[self._group(segment.parameter)]
            others = partition.world_size - 1
            sample.sent += segment.numel if segment.owner != rank else segment.numel * others * everywhere
            count = max(1, segment.numel // (RATE * PIECE))
            stride = segment.numel // count
            for first in range(0, count * stride, max(1, stride)):
                piece = bucket.narrow(0, segment.offset + first, min(PIECE, stride)).to(torch.float32, copy=True)
                sample.pieces.append(piece)
                sample.stands_for.append(segment.numel / count / piece.numel())

    def _group(self, name: str) -> int:
        called = self._user_name(name)
        matches = (index for index, pattern in enumerate(self._adaptive.groups) if re.search(pattern, called))
        return next(matches, len(self._adaptive.groups))

    def forget(self) -> None:
        """The samples of a step that is not measured."""
        self._samples = self._fresh()

    def measure(self, group: ProcessGroup, waited: float, step: float) -> Measurement:
        """What all ranks have seen in a step that took `step` seconds and `waited` for messages. Collective."""
        samples = self._samples
        self.forget()
        joined = [sample.joined(self._device) for sample in samples]
        sent = [sample.sent for sample in samples]
        norms = [_weighted(x, weights) for x, weights in joined]
        tried = [self._try(settings, joined, sent) for settings in self._adaptive.candidates]
        sums = self._reduced([waited, step, *norms, *(x for one in tried for x in (*one.errors, *one.sizes))], "SUM")
        count, world = len(samples), dist.get_world_size()
        rows = [sums[start : start + count] for start in range(2, len(sums), count)]
        return Measurement(
            errors=tuple(map(tuple, rows[1::2])),
            norms=tuple(rows[0]),
            sizes=tuple(tuple(size / world for size in row) for row in rows[2::2]),
            codec_seconds=tuple(self._reduced([one.seconds for one in tried], "MAX")),
            link=self._probe(group),
            waited=sums[0] / world,
            step=sums[1] / world,
        )

    def _try(self, settings: GradientsConfig, joined: Sequence[tuple[Tensor, Tensor]], sent: Sequence[int]) -> _Trial:
        if not isinstance(settings, MethodConfig):
            return _Trial([0.0] * len(sent), [float(self._itemsize * numel) for numel in sent], 0.0)
        compressor = settings.compressor()
        begin = self._now()
        left = [_left(compressor, x) for x, _ in joined]
        elapsed = self._now() - begin
        bytes_each = compressor.payload_bytes(NUMEL) / NUMEL
        numel = sum(x.numel() for x, _ in joined)
        errors = [_weighted(rest, weights) for rest, (_, weights) in zip(left, joined, strict=True)]
        return _Trial(errors, [bytes_each * one for one in sent], elapsed * sum(sent) / max(numel, 1))

    def _now(self) -> float:
        """Seconds, of this thread's work on a CPU: what else runs there tells nothing of a codec."""
        if self._device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

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
        """Sum or maximum over all ranks, those of other stages too."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
        return list(tensor.tolist())


def _left(compressor: Compressor, x: Tensor) -> Tensor:
    """What a message of `x` (flat fp32) loses."""
    left = x.clone()
    if x.numel():
        payload = torch.empty(compressor.payload_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        compressor.compress(x, payload, 0)
        compressor.decompress_add(payload, left, -1.0)
    return left


def _weighted(x: Tensor, weights: Tensor) -> float:
    return float(x.square().mul_(weights).sum())
