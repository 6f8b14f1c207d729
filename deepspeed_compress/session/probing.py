"""Costs and errors of the candidates of an adaptive choice, measured on a sample of a step's gradients."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.probes import link_seconds
from deepspeed_compress.compression.compressors import Compressor
from deepspeed_compress.config import GradientsConfig, MethodConfig, WeightsConfig
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.policy.measurement import AlphaBeta, Measurement, WeightCosts, fit
from deepspeed_compress.policy.selector import CandidateSelector

SLICE_NUMEL = 4096
"""Number of consecutive elements per slice of a sample."""
RATE = 32
"""Sampling ratio: one element in this many is in the sample, and more of small parameters."""
SMALLEST, LARGEST = 2**18, 2**22
"""Smallest and largest size in bytes of the larger probe of a link."""
TICK = 1e-7
"""Least seconds that a message is taken to need."""
CLEAR = 3
"""Least ratio between the times of the two probes, of which one has an eighth of the other's size.

Below it, latency and other work on the machine hide the bandwidth.
"""
FASTER = 1.5
"""Factor by which a link must seem faster than before to be measured again."""
MESSAGE = 2**20
"""Elements of the message from which sizes are computed, and of samples that are only timed."""


Trial = tuple[Sequence[float], Sequence[float], float]
"""Squared errors and bytes sent of a candidate, by group of parameters, and its seconds to encode and decode a step."""


@dataclass
class _Sample:
    """Sample of one group of parameters.

    Attributes:
        slices: slices of parameters, flat fp32.
        stands_for: for each slice, the number of elements that one of its elements represents.
        sent: elements of the group that this rank sends in the step.
    """

    slices: list[Tensor] = field(default_factory=list)
    stands_for: list[float] = field(default_factory=list)
    sent: int = 0

    def joined(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sampled elements (flat fp32), and the number of elements that each represents."""
        if not self.slices:
            return torch.zeros(0, device=device), torch.zeros(0, device=device)
        counts = torch.tensor([values.numel() for values in self.slices], device=device)
        weights = torch.tensor(self.stands_for, dtype=torch.float32, device=device)
        return torch.cat(self.slices), weights.repeat_interleave(counts)


@dataclass(frozen=True)
class WeightTraffic:
    """Weights whose fp32 master weights are on this rank, and their traffic in a step.

    Attributes:
        own: elements that this rank owns.
        sent: elements that it sends to the other ranks.
        decoded: elements that it decodes.
        itemsize: bytes of an uncompressed element.
        overlap: True if they are sent while the next forward runs.
    """

    own: int = 0
    sent: int = 0
    decoded: int = 0
    itemsize: int = 4
    overlap: bool = False


class Prober:
    """Prober that samples the buckets of a step and measures the candidates when it is over.

    Args:
        adaptive: the policy's choices.
        parameters: the model's parameters.
        device: device of the gradients.
        everyone: the group of ranks that decide alike; None for the whole job.
    """

    def __init__(
        self,
        adaptive: CandidateSelector,
        parameters: Parameters,
        device: torch.device,
        everyone: ProcessGroup | None = None,
    ) -> None:
        self._adaptive, self._parameters, self._device, self._everyone = adaptive, parameters, device, everyone
        self._last: AlphaBeta | None = None
        self.forget()

    def see(self, bucket: Tensor, partition: Partition, rank: int, everywhere: bool) -> None:
        """Sample `bucket`, which is about to be reduced to its owners, or to all ranks if `everywhere`."""
        to_all = (partition.world_size - 1) * everywhere
        for segment in partition.segments:
            name = self._parameters.user_name(segment.parameter)
            matches = (index for index, pattern in enumerate(self._adaptive.groups) if re.search(pattern, name))
            # Parameters that match no pattern are the last group.
            sample = self._samples[next(matches, -1)]
            sample.sent += segment.numel * (1 if segment.owner != rank else to_all)
            count = max(1, segment.numel // (RATE * SLICE_NUMEL))
            stride = segment.numel // count
            for first in range(0, count * stride, max(1, stride)):
                values = bucket.narrow(0, segment.offset + first, min(SLICE_NUMEL, stride)).to(torch.float32, copy=True)
                sample.slices.append(values)
                sample.stands_for.append(segment.numel / count / values.numel())

    def forget(self) -> None:
        """Drop the samples of a step that is not measured."""
        self._samples = [_Sample() for _ in range(len(self._adaptive.groups) + 1)]

    def measure(self, group: ProcessGroup, waited: float, step: float, traffic: WeightTraffic) -> Measurement:
        """Measure the candidates on the samples of all ranks. Collective.

        Args:
            group: the ranks between which gradients are reduced.
            waited: seconds for which this rank waited for messages in the step.
            step: seconds that the step took.
            traffic: traffic of the weights whose settings are chosen.
        """
        samples = self._samples
        self.forget()
        joined = [sample.joined(self._device) for sample in samples]
        sent = [sample.sent for sample in samples]
        norms = [weighted(x, weights) for x, weights in joined]
        tried = [self._try(settings, joined, sent) for settings in self._adaptive.candidates]
        sums = self._reduced(
            [waited, step, *norms, *(x for errors, sizes, _ in tried for x in (*errors, *sizes))], "SUM"
        )
        count, world = len(samples), dist.get_world_size(self._everyone)
        rows = [sums[start : start + count] for start in range(2, len(sums), count)]
        return Measurement(
            errors=tuple(map(tuple, rows[1::2])),
            norms=tuple(rows[0]),
            sizes=tuple(tuple(size / world for size in row) for row in rows[2::2]),
            codec_seconds=tuple(self._reduced([seconds for *_, seconds in tried], "MAX")),
            link=self._link(group),
            waited=sums[0] / world,
            step=sums[1] / world,
            # At most as many elements as a message has.
            weights=self._measure_weights(torch.cat([x for x, _ in joined])[:MESSAGE], world, traffic),
        )

    def _try(self, settings: GradientsConfig, joined: Sequence[tuple[Tensor, Tensor]], sent: Sequence[int]) -> Trial:
        """Try a candidate on a sample, `joined`, if this rank sends `sent` elements; both are by group."""
        errors = [0.0] * len(sent)
        if not isinstance(settings, MethodConfig):
            return errors, [float(self._parameters.dtype.itemsize * numel) for numel in sent], 0.0
        compressor, begin = settings.compressor(), now(self._device)
        left = [_left(compressor, x) for x, _ in joined]
        elapsed, numel = now(self._device) - begin, sum(x.numel() for x, _ in joined)
        # The error of one message does not describe a momentum, and these methods have no other candidates.
        if settings.method not in OWN_MOMENTUM:
            errors = [weighted(rest, weights) for rest, (_, weights) in zip(left, joined, strict=True)]
        return errors, [bytes_each(compressor) * one for one in sent], elapsed * sum(sent) / max(numel, 1)

    def _measure_weights(self, sample: Tensor, world: int, traffic: WeightTraffic) -> WeightCosts:
        """Return the costs of all weight candidates. The time of a codec does not depend on the encoded values."""
        tried = [_try_weights(settings, sample, traffic) for settings in self._adaptive.weights]
        sizes = self._reduced([size / world for size, _ in tried], "SUM")
        seconds = self._reduced([seconds for _, seconds in tried], "MAX")
        return WeightCosts(tuple(sizes), tuple(seconds), traffic.overlap)

    def _link(self, group: ProcessGroup) -> AlphaBeta:
        """Return latency and bandwidth as `_probe`, measured twice if the link seems faster than before.

        A link may have saved up credit while it was idle (token buckets of clouds). All ranks decide alike, because the
        figures are the same on all.
        """
        found = self._probe(group)
        if self._last is not None and found.bandwidth > FASTER * self._last.bandwidth:
            found = max(found, self._probe(group), key=lambda one: one.seconds_per_byte)
        self._last = found
        return found

    def _probe(self, group: ProcessGroup) -> AlphaBeta:
        """Measure latency and bandwidth of the link; equal on all ranks, zero cost in a group of one rank."""
        if group.size() == 1:
            return AlphaBeta(0.0, 0.0)
        large, seconds = SMALLEST // 4, [1.0, 1.0]
        while seconds[1] < CLEAR * seconds[0] and large < LARGEST:
            large *= 4
            sizes = [large // 8, large]
            measured = link_seconds(group, self._device, sizes)
            # The clock may not have advanced.
            seconds = [max(one, TICK) for one in self._reduced(measured, "MAX")]
        return fit(sizes, seconds)

    def _reduced(self, values: Sequence[float], operation: str) -> list[float]:
        """Return the sum or maximum of `values` over all ranks that decide alike, including other pipeline stages."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=self._everyone)
        return list(tensor.tolist())


def now(device: torch.device) -> float:
    """Return the time in seconds; on a CPU that of this thread alone, so that other work does not disturb it."""
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def bytes_each(compressor: Compressor) -> float:
    """Return the bytes per element of a long message."""
    return compressor.payload_bytes(MESSAGE) / MESSAGE


def _left(compressor: Compressor, x: Tensor) -> Tensor:
    """Return what a message of `x` (flat fp32) loses."""
    left = x.clone()
    if x.numel():
        compressor.decompress_add(_payload(compressor, x), left, -1.0)
    return left


def _payload(compressor: Compressor, x: Tensor) -> Tensor:
    payload = torch.empty(compressor.payload_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    compressor.compress(x, payload, 0)
    return payload


def weighted(x: Tensor, weights: Tensor) -> float:
    return float(x.square().mul_(weights).sum())


def _try_weights(settings: WeightsConfig, sample: Tensor, traffic: WeightTraffic) -> tuple[float, float]:
    """Return the bytes that this rank sends in a step, and the codec's seconds."""
    if not isinstance(settings, MethodConfig):
        return float(traffic.itemsize * traffic.sent), 0.0
    compressor = settings.compressor()
    if not traffic.sent or not sample.numel():
        return bytes_each(compressor) * traffic.sent, 0.0
    out, begin = torch.zeros_like(sample), now(sample.device)
    payload = _payload(compressor, sample)
    encoded = now(sample.device)
    compressor.decompress_add(payload, out, 1.0)
    encoding, decoding = encoded - begin, now(sample.device) - encoded
    seconds = (encoding * traffic.own + decoding * traffic.decoded) / sample.numel()
    return bytes_each(compressor) * traffic.sent, seconds
