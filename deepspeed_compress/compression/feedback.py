"""Error feedback and its variants: a sender adds its residual to a message, and stores the error of the message.

The algorithm is that of Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1, without the
step size): p = g + e; send C(p); e = p - C(p). Residuals are in the units of the gradients, including the loss scale,
and in the basis in which the codec compresses: the transform T is linear, so T p = T g + T e, and T e is stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.codec import Batch, Codec, NoSend
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import FIRST, Keys, ResidualBuffers
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment


class Feedback(ABC):
    """Treatment of the compression error of a message."""

    @abstractmethod
    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode `x` plus its residual into `out`, and store what the message leaves out.

        Args:
            x: flat fp32, `codec.coefficients` of `segments`; not changed.
            segments: the elements of `x`, in order.
            out: uint8 [codec.compressor.payload_bytes(x.numel())].
            key: the message's random key.
            codec: the codec of the message.
        """

    def encode_all(self, x: Tensor, at: int, batch: Batch, out: Tensor, keys: Keys, codec: Codec) -> None:
        """Do what `encode` does for each message of `batch`, in one call if feedback and codec can.

        The coefficients `x` lie where column `at` of the batch's table says.
        """
        for part, values in batch.views(x, at):
            key = keys.of(part.owner, part.channel)
            self.encode(values, part.segments, out[part.begin : part.end], key, codec)

    @abstractmethod
    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        """Return what this rank adds for its own elements `x` (flat fp32, may be overwritten).

        None means that it adds what other ranks would decode.
        """


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """No error feedback: what the codec leaves out is lost."""

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        codec.compressor.compress(x, out, key)

    def encode_all(self, x: Tensor, at: int, batch: Batch, out: Tensor, keys: Keys, codec: Codec) -> None:
        if codec.many is not None:
            codec.many.compress_all(x, at, out, batch.table, keys, None)
        else:
            super().encode_all(x, at, batch, out, keys, codec)

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        return x


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Error feedback: what the codec leaves out, times `decay`, is added to the next message of the same elements.

    With `decay` below 1, old errors fade (LoCo, arXiv:2407.04480). With a transform and top-k, this is DeMo's decoupled
    momentum (arXiv:2411.19870, algorithm 1: m = decay * m + g; send top-k of DCT(m); m -= what was sent), with m stored
    as DCT(m). Decoupled momentum needs `own_exact=False`, so that a rank's own elements carry the same momentum as
    those of the other ranks.
    """

    residuals: Residuals
    decay: float = 1.0
    own_exact: bool = True

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode `x` (flat fp32, coefficients of `segments`, not changed) plus the residual into `out` (uint8).

        decoded + new residual == x + decay * old residual: to rounding, and exactly where the subtraction is exact.
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

    def encode_all(self, x: Tensor, at: int, batch: Batch, out: Tensor, keys: Keys, codec: Codec) -> None:
        many, table = codec.many, batch.table
        buffers = None if many is None else self.residuals.joint_buffers(batch, x.device, codec.transform)
        if many is None or buffers is None:
            super().encode_all(x, at, batch, out, keys, codec)
            return
        before, after = buffers
        if codec.fused is not None:
            many.compress_all(x, at, out, table, keys, ResidualBuffers(before, self.decay, after))
            return
        total, kernels = x.clone() if at == FIRST else batch.gather(x), for_device(x.device)
        kernels.add_cast(before, total, self.decay)
        many.compress_all(total, FIRST, out, table, keys, None)
        many.decompress_all(out.unsqueeze(0), table, total, FIRST, -1.0, add=True)
        kernels.cast(total, after)

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        """Return this rank's own elements `x` (overwritten) exactly, plus any residual that they still have.

        They have a residual after a step with `NoSend`, or if another rank owned them before.
        """
        if isinstance(codec.compressor, NoSend) or not self.own_exact:
            return None
        if self.residuals.holds(segments):
            self.residuals.add_to(x, segments, self.decay)
            self.residuals.write(segments, torch.zeros_like(x))
        return x


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Deep Gradient Compression: momentum before sparsification; both buffers are cleared where a value was sent.

    Source: Lin et al. (arXiv:1712.01887, equations 4 and 6, algorithm 4): u = m u + g; v = v + u; send C(v);
    v -= C(v); u = 0 where C(v) is not zero (momentum factor masking). With `nesterov`: u = m (u + g); v = v + u + g.
    The quantization error of the values that were sent stays in v.
    """

    velocity: Residuals
    accumulated: Residuals
    momentum: float
    nesterov: bool = False

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Add gradients `x` (flat fp32 coefficients, not changed) to the velocity, and encode what has accumulated."""
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
        """Return None: own elements are encoded like all others, so that all of them carry the same momentum."""
        return None


@dataclass(frozen=True)
class SpreadSum:
    """Spreads a sum that arrives once in `every` steps over that many steps, in equal parts.

    Adam normalizes by the size of the gradients that it sees. A burst between zeros moves a weight less than the same
    sum in equal parts would, and it counts for more in the global norm for clipping.
    """

    left: Residuals
    every: int

    def deliver(self, total: Tensor, segments: Sequence[Segment], step: int) -> Tensor:
        """Return the part for optimizer step `step` (0-based), given `total` (flat fp32), which arrived in this step.

        A step may consist of several messages (micro-steps of ZeRO 2 and 3); the first one brings what was left over.
        If a step is skipped, the remaining steps deliver its part.
        """
        parts = self.every - (step + 1) % self.every
        left = self.left.read(segments, total.device)
        part = (total if self.left.written(segments) else total + left) / parts
        self.left.write(segments, left.add_(total).sub_(part))
        return part
