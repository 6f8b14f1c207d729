"""What a sender adds to a message from its memory, and what it remembers of it.

Error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1, without the step
size): p = g + e; send C(p); e = p - C(p). Residuals live in the units of the gradients (the loss scale included), and
in the basis that the codec compresses in: its transform is linear, so T p = T g + T e, and T e is what is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.kernels.forms import ResidualBuffers
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment

__all__ = ["ErrorFeedback", "Feedback", "MomentumCorrection", "NoFeedback", "SpreadSum"]


class Feedback(Protocol):
    """What a sender does with what a message leaves out."""

    @property
    def own_exact(self) -> bool:
        """Whether a rank's own elements, which travel nowhere, are added as they are, not as others would decode
        them."""

    @property
    def stores(self) -> tuple[Residuals, ...]:
        """Where it keeps a number for every element."""

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode `x` (flat fp32, `codec.coefficients` of `segments`, not changed) with what is kept of them into `out`
        (uint8 [codec.compressor.payload_bytes(x.numel())]), and keep what that leaves out."""

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        """What this rank adds to its own elements `x` (flat fp32, as they are, may be overwritten); None: what others
        would decode."""


@dataclass(frozen=True)
class NoFeedback:
    """What the codec leaves out is lost."""

    own_exact = True
    stores: tuple[Residuals, ...] = ()

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        codec.compressor.compress(x, out, key)

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        return x


@dataclass(frozen=True)
class ErrorFeedback:
    """What the codec leaves out is added, times `decay`, to the next message of the same elements.

    `decay` below 1 forgets (LoCo, arXiv:2407.04480); with a transform and top-k it is DeMo's decoupled momentum
    (arXiv:2411.19870, algorithm 1: m = decay * m + g; send top-k of DCT(m); m -= what was sent; here all of m is
    kept as DCT(m)), which needs `own_exact` off, so that a rank's own elements carry the same momentum as the others'.
    """

    residuals: Residuals
    decay: float = 1.0
    own_exact: bool = True

    @property
    def stores(self) -> tuple[Residuals, ...]:
        return (self.residuals,)

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode `x` (flat fp32, coefficients of `segments`, not changed) plus their residual into `out` (uint8).

        decoded + new residual == x + decay * old residual to rounding, and exactly where the subtraction is exact.
        """
        basis, fused = codec.transform, codec.fused
        buffers = self.residuals.buffers(segments, x.device, basis) if fused is not None else None
        if fused is not None and buffers is not None:
            before, after = buffers
            fused.compress_with_feedback(x, out, key, ResidualBuffers(before, self.decay, after))
            return
        total = x.clone()
        self.residuals.add_to(total, segments, self.decay, basis)
        codec.compressor.compress(total, out, key)
        codec.add_coefficients([out], total, -1.0)
        self.residuals.write(segments, total, basis)

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        """What this rank adds to its own elements `x` (overwritten): exact, with any residual that they still have.

        They have one after a silent codec, and when another rank owned them before.
        """
        if not codec.sends or not self.own_exact:
            return None
        if self.residuals.holds(segments):
            self.residuals.add_to(x, segments, self.decay)
            self.residuals.write(segments, torch.zeros_like(x))
        return x


@dataclass(frozen=True)
class MomentumCorrection:
    """Deep Gradient Compression: momentum before sparsification, and both memories cleared where a value was sent.

    Lin et al. (arXiv:1712.01887, equations 4 and 6, algorithm 4): u = m u + g; v = v + u; send C(v); v -= C(v);
    u = 0 where C(v) is not zero (momentum factor masking). `nesterov`: u = m (u + g); v = v + u + g. What
    quantization changes of the sent values stays in v.
    """

    velocity: Residuals
    accumulated: Residuals
    momentum: float
    nesterov: bool = False

    @property
    def own_exact(self) -> bool:
        """False: own elements are coded as for the others, so that all carry the same momentum."""
        return False

    @property
    def stores(self) -> tuple[Residuals, ...]:
        return self.velocity, self.accumulated

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode the accumulated velocity after gradients `x` (flat fp32, coefficients, not changed) into `out`."""
        basis = codec.transform
        velocity = self.velocity.read(segments, x.device, basis)
        if self.nesterov:
            velocity.add_(x).mul_(self.momentum)
            total = x + velocity
        else:
            velocity.mul_(self.momentum).add_(x)
            total = velocity.clone()
        self.accumulated.add_to(total, segments, 1.0, basis)
        codec.compressor.compress(total, out, key)
        sent = torch.zeros_like(total)
        codec.add_coefficients([out], sent, 1.0)
        self.accumulated.write(segments, total.sub_(sent), basis)
        self.velocity.write(segments, velocity.masked_fill_(sent != 0, 0.0), basis)

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        return None


@dataclass(frozen=True)
class SpreadSum:
    """A sum that arrives in every `every`-th step is handed on in as many equal parts, one a step, from that step on.

    Adam normalizes by the size of what it sees: a burst among zeros moves a weight less than the same sum in equal
    parts, and counts more in the global norm for clipping.
    """

    left: Residuals
    every: int

    def deliver(self, total: Tensor, segments: Sequence[Segment], step: int) -> Tensor:
        """The part of optimizer step `step` (0-based); `total`: flat fp32, what arrived in it.

        A step may consist of several messages (micro-steps of ZeRO 2 and 3): what is left comes with the first of them.
        What a skipped step did not hand on is in the parts of the others.
        """
        parts = self.every - (step + 1) % self.every
        left = self.left.read(segments, total.device)
        part = (total if self.left.written(segments) else total + left) / parts
        self.left.write(segments, left.add_(total).sub_(part))
        return part
