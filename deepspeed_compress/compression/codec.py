"""Codecs: a change of basis followed by a compressor, as both ends of a message apply them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor, FusedFeedback, FusedSum
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.compression.transforms import Identity, Transform


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

    @property
    def sends(self) -> bool:
        """Return True if the payload carries information about the input (False for `NoSend`)."""
        return not isinstance(self.compressor, NoSend)

    @cached_property
    def fused(self) -> FusedFeedback | None:
        """Compressor that updates the error-feedback residual in the same pass; None if this one does not."""
        return self.compressor if isinstance(self.compressor, FusedFeedback) else None

    @cached_property
    def _fused_sum(self) -> FusedSum | None:
        return self.compressor if isinstance(self.compressor, FusedSum) else None

    def coefficients(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return the coefficients of `x` (flat fp32, the elements of `segments`, not changed); may be `x` itself."""
        return self.transform.forward(x, segments)

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, the elements of `segments`, not changed) into `out` (uint8)."""
        self.compressor.compress(self.coefficients(x, segments), out, key)

    def add_coefficients(self, payloads: Sequence[Tensor], out: Tensor, scale: float) -> None:
        """Add `scale` times the sum of the decoded `payloads`, in their order, to `out` (flat fp32 coefficients)."""
        if self._fused_sum is not None:
            self._fused_sum.decompress_sum(payloads, out, scale, add=True)
            return
        for payload in payloads:
            self.compressor.decompress_add(payload, out, scale)

    def _set_coefficients(self, payloads: Sequence[Tensor], out: Tensor, scale: float) -> Tensor:
        """Overwrite `out` with what `add_coefficients` would add to it, and return it."""
        if self._fused_sum is not None:
            self._fused_sum.decompress_sum(payloads, out, scale, add=False)
        else:
            self.add_coefficients(payloads, out.zero_(), scale)
        return out

    def decode(self, payloads: Sequence[Tensor], segments: Sequence[Segment], out: Tensor, scale: float) -> None:
        """Set `out` (flat fp32) to `scale` times the sum of the decoded `payloads`, in their order.

        Coefficients are summed, and one inverse transform follows (SDP4Bit, arXiv:2410.15526, section 3.3).
        """
        if isinstance(self.transform, Identity):
            self._set_coefficients(payloads, out, scale)
            return
        self.transform.inverse(self._set_coefficients(payloads, torch.empty_like(out), scale), segments, out)

    def decode_add(self, payloads: Sequence[Tensor], segments: Sequence[Segment], out: Tensor, scale: float) -> None:
        """Add what `decode` computes to `out` (flat fp32)."""
        if isinstance(self.transform, Identity):
            self.add_coefficients(payloads, out, scale)
            return
        decoded = torch.empty_like(out)
        self.decode(payloads, segments, decoded, scale)
        out.add_(decoded)
