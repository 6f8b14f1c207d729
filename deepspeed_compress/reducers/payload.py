"""Compressed reduce-scatter and all-reduce of a flat bucket: one packed message to each owner, fp32 sums."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.buckets import Partition, Segment, gather, scatter
from deepspeed_compress.compressors.base import Compressor, random_key
from deepspeed_compress.reducers.exchange import exchange
from deepspeed_compress.reducers.plan import CodecOf, Piece, Plan, make_plan

__all__ = ["Encoder", "PayloadReducer", "StepClock"]


class Encoder(Protocol):
    """A compressor with or without a memory of what it left out (`feedback` has both)."""

    @property
    def compressor(self) -> Compressor: ...

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None: ...


class Meter(Protocol):
    """Where bytes and times are counted (`monitor.Meter`)."""

    bytes_sent: int

    def phase(self, name: str, device: torch.device) -> AbstractContextManager[None]: ...


@dataclass
class StepClock:
    """Where the run is: `step` counts optimizer steps, `message` the messages since its beginning."""

    step: int = 0
    message: int = 0

    def next_message(self) -> int:
        self.message += 1
        return self.message

    def begin(self, step: int) -> None:
        self.step, self.message = step, 0


class PayloadReducer:
    """Reduces buckets over `group`.

    `encoders`: one a codec, for the gradients that this rank sends; `mean_encoders`: the same codecs for the means that
    it owns and sends back in `all_reduce`. `codec_of` gives the codec of a parameter. A rank's own elements never
    travel, hence they enter the sum exactly.
    """

    def __init__(
        self,
        group: ProcessGroup,
        encoders: Sequence[Encoder],
        mean_encoders: Sequence[Encoder],
        codec_of: CodecOf,
        clock: StepClock,
        meter: Meter,
        seed: int = 0,
    ) -> None:
        self.group = group
        self.encoders = tuple(encoders)
        self.mean_encoders = tuple(mean_encoders)
        self.codec_of = codec_of
        self.clock = clock
        self.meter = meter
        self.seed = seed
        self._compressors = tuple(encoder.compressor for encoder in encoders)
        self._rank: int = group.rank()
        self._plans: dict[Partition, Plan] = {}

    def plan(self, partition: Partition) -> Plan:
        """The message layout for `partition`, computed once."""
        if partition not in self._plans:
            self._plans[partition] = make_plan(partition, self._compressors, self.codec_of)
        return self._plans[partition]

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """This rank's own segments of `bucket` become `scale` times the sum over the ranks; others keep their values.

        `bucket`: flat fp32, bf16 or fp16 [partition.numel]. Sums are fp32, in rank order on every rank.
        """
        self._keep(self._reduce(bucket, partition, scale), bucket, partition)

    def _keep(self, total: Tensor, bucket: Tensor, partition: Partition) -> None:
        """Put this rank's sums where they belong."""
        for piece in self.plan(partition).pieces[self._rank]:
            scatter(total[piece.first : piece.first + piece.numel], piece.segments, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks, the same bits on every rank.

        Each owner encodes its mean again, with a residual of its own, and decodes it as the others do.
        """
        total = self._reduce(bucket, partition, scale)
        if self.group.size() == 1:
            # Nothing travels, so nothing is encoded.
            self._keep(total, bucket, partition)
            return
        plan, message = self.plan(partition), self.clock.next_message()
        with self.meter.phase("compress", bucket.device):
            mine = self._encode(total, plan, self._rank, self.mean_encoders, message)
        incoming = [bucket.new_empty(size, dtype=torch.uint8) for size in plan.sizes]
        incoming[self._rank] = mine
        self._exchange([mine] * len(incoming), incoming)
        with self.meter.phase("decompress", bucket.device):
            for payload, pieces in zip(incoming, plan.pieces, strict=True):
                for piece in pieces:
                    scatter(self._decoded(payload, piece), piece.segments, bucket)

    def _reduce(self, bucket: Tensor, partition: Partition, scale: float) -> Tensor:
        """`scale` times the sum of this rank's elements, fp32, piece after piece of its plan."""
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        plan, message = self.plan(partition), self.clock.next_message()
        with self.meter.phase("compress", bucket.device):
            outgoing = [self._outgoing(bucket, plan, owner, message) for owner in range(partition.world_size)]
        size = plan.sizes[self._rank]
        incoming = [bucket.new_empty(size, dtype=torch.uint8) for _ in outgoing]
        self._exchange(outgoing, incoming)
        with self.meter.phase("decompress", bucket.device):
            return self._sum(bucket, incoming, plan, scale)

    def _outgoing(self, bucket: Tensor, plan: Plan, owner: int, message: int) -> Tensor:
        if owner == self._rank:
            return bucket.new_empty(0, dtype=torch.uint8)
        flat = _gather_pieces(bucket, plan.pieces[owner])
        return self._encode(flat, plan, owner, self.encoders, message)

    def _encode(self, flat: Tensor, plan: Plan, owner: int, encoders: Sequence[Encoder], message: int) -> Tensor:
        """The packed message of the elements of `owner`, `flat` (fp32; used as work space)."""
        payload = torch.empty(plan.sizes[owner], dtype=torch.uint8, device=flat.device)
        for piece in plan.pieces[owner]:
            x, out = flat[piece.first : piece.first + piece.numel], payload[piece.begin : piece.end]
            key = random_key(self.seed, self.clock.step, message, owner, self._rank, piece.codec)
            encoders[piece.codec].encode(x, piece.segments, out, key)
        return payload

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        with self.meter.phase("communicate", incoming[0].device):
            exchange(self.group, outgoing, incoming)
        self.meter.bytes_sent += sum(part.numel() for peer, part in enumerate(outgoing) if peer != self._rank)

    def _sum(self, bucket: Tensor, incoming: Sequence[Tensor], plan: Plan, scale: float) -> Tensor:
        pieces = plan.pieces[self._rank]
        total = torch.zeros(plan.numels[self._rank], dtype=torch.float32, device=bucket.device)
        for source, payload in enumerate(incoming):
            if source == self._rank:
                total.add_(_gather_pieces(bucket, pieces), alpha=scale)
                continue
            for piece in pieces:
                part = total[piece.first : piece.first + piece.numel]
                self._compressors[piece.codec].decompress_add(payload[piece.begin : piece.end], part, scale)
        return total

    def _decoded(self, payload: Tensor, piece: Piece) -> Tensor:
        out = torch.zeros(piece.numel, dtype=torch.float32, device=payload.device)
        self._compressors[piece.codec].decompress_add(payload[piece.begin : piece.end], out, 1.0)
        return out


def _gather_pieces(bucket: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The elements of one owner in the order of its pieces: a new flat fp32 tensor."""
    return gather(bucket, [segment for piece in pieces for segment in piece.segments])
