"""What both ends of a message agree on: a change of basis, then a compressor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor, FusedFeedback, FusedSum
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.compression.transforms import Identity, Transform

__all__ = ["Codec", "NoSend"]


@dataclass(frozen=True)
class NoSend:
    """Decodes to zeros: the steps between two sends of delayed synchronisation.

    Payload: one fp32 number, 0, or NaN if an element is not finite, which makes all decoded ones NaN: the optimizer
    must skip such a step now, before the memory of what was held back is spoiled.
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
    """`compressor` applied to the coefficients that `transform` gives."""

    compressor: Compressor
    transform: Transform = Identity()  # noqa: RUF009  (frozen, hence safe to share)

    @property
    def sends(self) -> bool:
        """Whether what it decodes to says anything of what was encoded."""
        return not isinstance(self.compressor, NoSend)

    @property
    def fused(self) -> FusedFeedback | None:
        """The compressor, if it takes the memory of error feedback along."""
        return self.compressor if isinstance(self.compressor, FusedFeedback) else None

    def coefficients(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """What the compressor sees of `x` (flat fp32, the elements of `segments`, not changed); perhaps `x` itself."""
        return self.transform.forward(x, segments)

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, the elements of `segments`, not changed) into `out` (uint8)."""
        self.compressor.compress(self.coefficients(x, segments), out, key)

    def add_coefficients(self, payloads: Sequence[Tensor], out: Tensor, scale: float) -> None:
        """`out` (flat fp32, coefficients) += `scale` * the sum of the decoded `payloads`, in their order."""
        if isinstance(self.compressor, FusedSum):
            self.compressor.decompress_sum(payloads, out, scale, add=True)
            return
        for payload in payloads:
            self.compressor.decompress_add(payload, out, scale)

    def _set_coefficients(self, payloads: Sequence[Tensor], out: Tensor, scale: float) -> Tensor:
        """`out`, whatever is in it, = what `add_coefficients` adds."""
        if isinstance(self.compressor, FusedSum):
            self.compressor.decompress_sum(payloads, out, scale, add=False)
        else:
            self.add_coefficients(payloads, out.zero_(), scale)
        return out

    def decode(self, payloads: Sequence[Tensor], segments: Sequence[Segment], out: Tensor, scale: float) -> None:
        """`out` (flat fp32) = `scale` * the sum of the decoded `payloads`, in their order.

        The sum is one of coefficients, with a single inverse at the end (SDP4Bit, arXiv:2410.15526, section 3.3).
        """
        if isinstance(self.transform, Identity):
            self._set_coefficients(payloads, out, scale)
            return
        self.transform.inverse(self._set_coefficients(payloads, torch.empty_like(out), scale), segments, out)

    def decode_add(self, payloads: Sequence[Tensor], segments: Sequence[Segment], out: Tensor, scale: float) -> None:
        """`out` (flat fp32) += what `decode` gives."""
        if isinstance(self.transform, Identity):
            self.add_coefficients(payloads, out, scale)
            return
        decoded = torch.empty_like(out)
        self.decode(payloads, segments, decoded, scale)
        out.add_(decoded)
