"""Codecs: a change of basis followed by a compressor, as both ends of a message apply them; and batches.

A batch is the messages of several owners that one codec encodes or decodes in one call. Its elements lie in a bucket,
or in a flat fp32 tensor that holds message after message. There, each begins at a multiple of the codec's alignment,
and nothing reads what lies between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor, FusedFeedback, ManyMessages
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import FIRST, SOURCE, MessageTable, single
from deepspeed_compress.compression.segments import Segment, runs_of
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform

_ALIGNMENT = 16
"""Number of elements whose multiples are the first elements of messages, so that programs load 16 bytes at once."""


@dataclass(frozen=True)
class Part:
    """Segments of one owner that one codec encodes as a single vector of `numel` elements.

    Attributes:
        segments: the segments; their offsets are places in the bucket.
        numel: number of elements.
        begin: first byte within the owner's message or, in a batch, within the buffer of all messages.
        end: end of its bytes there, exclusive.
        owner: owner of the elements, and with
        channel: the channel, part of the message's random key.
        first: index of its first element among the owner's elements, in message order.
    """

    segments: tuple[Segment, ...]
    numel: int
    begin: int
    end: int
    owner: int
    channel: int
    first: int


class Batch:
    """The messages `parts`, whose elements begin at multiples of `alignment` in a flat tensor."""

    def __init__(self, parts: Sequence[Part], alignment: int) -> None:
        self.parts = tuple(parts)
        rows, runs, first = [], [], 0
        for part in self.parts:
            pieces, position = runs_of(part.segments), first
            source = pieces[0][0] if len(pieces) == 1 else -1
            rows.append((source, first, part.numel, part.begin, part.end, part.owner, part.channel))
            for offset, numel in pieces:
                runs.append((offset, position, numel, 0, 0, 0, 0))
                position += numel
            first += -(-part.numel // alignment) * alignment
        self.numel = first
        self.table = MessageTable(torch.tensor(rows, dtype=torch.int64).view(-1, 7))
        self._runs = MessageTable(torch.tensor(runs, dtype=torch.int64).view(-1, 7))
        self._is_dense = first == sum(part.numel for part in self.parts)
        self._has_no_gaps = len(runs) == len(self.parts)

    def place(self, bucket: Tensor, flat: bool = False) -> tuple[Tensor, int]:
        """Return a tensor for the elements, and the table's column of their places in it.

        That is `bucket` itself if it is fp32, no message has gaps in it, and not `flat`; otherwise a new flat tensor.
        """
        if bucket.dtype == torch.float32 and self._has_no_gaps and not flat:
            return bucket, SOURCE
        return self.new_flat(bucket), FIRST

    def new_flat(self, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor for the elements. What lies between messages is 0."""
        return (like.new_empty if self._is_dense else like.new_zeros)(self.numel, dtype=dtype)

    def read(self, bucket: Tensor, flat: bool = False) -> tuple[Tensor, int]:
        """Return what `place` returns, filled with the elements of `bucket`."""
        x, at = self.place(bucket, flat)
        return (x, at) if at == SOURCE else (self.gather(bucket), at)

    def gather(self, bucket: Tensor) -> Tensor:
        """Return a new flat fp32 tensor with the elements of `bucket`."""
        flat = self.new_flat(bucket, bucket.dtype)
        for_device(bucket.device).copy_runs(bucket, flat, self._runs, False)
        return flat.to(torch.float32)

    def scatter(self, flat: Tensor, bucket: Tensor) -> None:
        """Write the elements of `flat` into `bucket`."""
        for_device(bucket.device).copy_runs(flat.to(bucket.dtype), bucket, self._runs, True)

    def views(self, x: Tensor, at: int) -> list[tuple[Part, Tensor]]:
        """Return each part with the view of its elements in `x`, which lie where column `at` says."""
        begins = [row[at] for row in self.table.values]
        return [(part, x[begin : begin + part.numel]) for part, begin in zip(self.parts, begins, strict=True)]


@dataclass(frozen=True)
class NoSend:
    """Compressor for the steps between two sends of delayed synchronization: it decodes to zeros.

    The payload is one fp32 number. It is 0, or NaN if any element is not finite, and a NaN makes every decoded element
    NaN. The optimizer must skip such a step at once, before the residual that holds back the gradients is spoiled.
    """

    def payload_bytes(self, numel: int) -> int:
        return 4 if numel else 0

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        if x.numel():
            out.view(torch.float32).copy_(x.mul(0.0).sum())

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        if out.numel():
            out.add_(payload.view(torch.float32))


@dataclass(frozen=True)
class Codec:
    """A `compressor` that is applied to the coefficients that `transform` returns."""

    compressor: Compressor
    transform: Transform = Identity()  # noqa: RUF009  (frozen, hence safe to share)

    @cached_property
    def fused(self) -> FusedFeedback | None:
        """Compressor that updates the error-feedback residual in the same pass; None if this one does not."""
        return self.compressor if isinstance(self.compressor, FusedFeedback) else None

    @cached_property
    def many(self) -> ManyMessages | None:
        """Compressor that encodes all messages of a batch at once; None if they are encoded one after another.

        Sparsifiers select within a message, and row quantizers are plain torch on rows of one message. The tiles of a
        DCT depend on where the segments of a message are cut.
        """
        return None if isinstance(self.transform, DCT) else self._many

    @cached_property
    def _many(self) -> ManyMessages | None:
        return self.compressor if isinstance(self.compressor, ManyMessages) else None

    @property
    def alignment(self) -> int:
        """Return the number whose multiples are the first elements of messages in a batch."""
        return self.transform.block_size if isinstance(self.transform, Hadamard) else _ALIGNMENT

    @property
    def is_plain(self) -> bool:
        """Return True if elements are compressed as they are."""
        return isinstance(self.transform, Identity)

    def coefficients(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return the coefficients of `x` (flat fp32, the elements of `segments`, not changed); may be `x` itself."""
        return self.transform.forward(x, segments)

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, the elements of `segments`, not changed) into `out` (uint8)."""
        self.compressor.compress(self.coefficients(x, segments), out, key)

    def coefficients_all(self, x: Tensor, at: int, batch: Batch) -> Tensor:
        """Return the coefficients of all messages of `batch`, in the places that `x` has them; may be `x` itself."""
        if isinstance(self.transform, Hadamard):
            return self.transform.forward_all(x, batch.table)
        if not self.is_plain:
            coefficients = torch.empty_like(x)
            for (part, elements), (_, out) in zip(batch.views(x, at), batch.views(coefficients, at), strict=True):
                out.copy_(self.transform.forward(elements, part.segments))
            return coefficients
        return x

    def decode_all(self, payload: Tensor, batch: Batch, out: Tensor, at: int, add: bool = False) -> None:
        """Set the elements of `out` to the decoded messages in `payload` (uint8), or `add` these.

        `out` is flat fp32. Elements lie where column `at` of the table says: at `FIRST` unless the codec `is_plain`.
        """
        if self.many is None:
            for part, elements in batch.views(out, at):
                self.decode([payload[part.begin : part.end]], part.segments, elements, 1.0, add)
        elif isinstance(self.transform, Hadamard):
            coefficients = batch.new_flat(out)
            self.many.decompress_all(payload.unsqueeze(0), batch.table, coefficients, FIRST, 1.0, add=False)
            decoded = self.transform.inverse_all(coefficients, batch.table)
            out.add_(decoded) if add else out.copy_(decoded)
        else:
            self.many.decompress_all(payload.unsqueeze(0), batch.table, out, at, 1.0, add)

    def add_coefficients(self, payloads: Sequence[Tensor], out: Tensor, scale: float, add: bool = True) -> None:
        """Add `scale` times the sum of the decoded `payloads`, in their order, to `out` (flat fp32 coefficients).

        Each of `payloads` is one message, uint8 [bytes], or several, uint8 [n, bytes]. If not `add`, `out` is
        overwritten.
        """
        if not add and (self._many is None or not payloads):
            out.zero_()
        for number, payload in enumerate(payloads):
            rows = payload.unsqueeze(0) if payload.dim() == 1 else payload
            if self._many is not None:
                table = single(out.numel(), rows.shape[1])
                self._many.decompress_all(rows, table, out, FIRST, scale, add or number > 0)
            else:
                for row in rows:
                    self.compressor.decompress_add(row, out, scale)

    def decode(
        self, payloads: Sequence[Tensor], segments: Sequence[Segment], out: Tensor, scale: float, add: bool = False
    ) -> None:
        """Set `out` (flat fp32) to `scale` times the sum of the decoded `payloads`, in their order, or `add` that.

        Coefficients are summed, and one inverse transform follows (SDP4Bit, arXiv:2410.15526, section 3.3).
        """
        if self.is_plain:
            self.add_coefficients(payloads, out, scale, add)
            return
        coefficients = torch.empty_like(out)
        self.add_coefficients(payloads, coefficients, scale, add=False)
        decoded = self.transform.inverse(coefficients, segments, torch.empty_like(out) if add else out)
        if add:
            out.add_(decoded)
