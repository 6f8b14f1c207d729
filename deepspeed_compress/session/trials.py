"""Cost and error of a candidate, tried on a sample of a step's gradients."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.collectives.low_rank import orthonormal
from deepspeed_compress.compression.compressors import Compressor

MESSAGE = 2**20
"""Elements of the message from which sizes are computed, and of samples that are only timed."""


@dataclass(frozen=True)
class Trial:
    """Cost and error of one candidate.

    Attributes:
        errors: squared errors, by group of parameters.
        sizes: bytes sent, by group of parameters.
        seconds: time to encode and decode a step.
        waits: messages that wait for each other (see `Measurement`).
    """

    errors: Sequence[float]
    sizes: Sequence[float]
    seconds: float
    waits: int = 0


def now(device: torch.device) -> float:
    """Return the time in seconds; on a CPU that of this thread alone, so that other work does not disturb it."""
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def bytes_each(compressor: Compressor) -> float:
    """Return the bytes per element of a long message."""
    return compressor.payload_bytes(MESSAGE) / MESSAGE


def try_messages(compressor: Compressor, joined: Sequence[tuple[Tensor, Tensor]], sent: Sequence[float]) -> Trial:
    """Try messages of `compressor` on a sample.

    Args:
        compressor: the candidate.
        joined: by group, a sample (flat fp32) and the number of elements that each of its elements represents.
        sent: by group, elements that this rank sends.
    """
    device = joined[0][0].device
    begin = now(device)
    left = [_left(compressor, x) for x, _ in joined]
    elapsed = now(device) - begin
    numel = sum(x.numel() for x, _ in joined)
    errors = [weighted(rest, weights) for rest, (_, weights) in zip(left, joined, strict=True)]
    return Trial(errors, [bytes_each(compressor) * one for one in sent], elapsed * sum(sent) / max(numel, 1))


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


def encode_seconds(compressor: Compressor, x: Tensor) -> float:
    """Return the seconds that it takes to encode one element of `x`, flat fp32 and not empty."""
    begin = now(x.device)
    _payload(compressor, x)
    return (now(x.device) - begin) / x.numel()


def decode_seconds(compressor: Compressor, x: Tensor) -> float:
    """Return the seconds that it takes to decode one element of a message of `x`, flat fp32 and not empty."""
    payload, out = _payload(compressor, x), torch.zeros_like(x)
    begin = now(x.device)
    compressor.decompress_add(payload, out, 1.0)
    return (now(x.device) - begin) / x.numel()


def low_rank_seconds(x: Tensor, rank: int) -> float:
    """Return the seconds per element of the computation of `PowerSGDReducer`.

    It is tried on `x` (flat fp32) as one square matrix; passes over memory and products are those of a stack of
    matrices.
    """
    side = math.isqrt(x.numel())
    if not side:
        return 0.0
    gradients, rank = x[: side * side], min(rank, side)
    residuals = gradients.to(torch.bfloat16)
    basis = orthonormal(gradients.view(1, side, side)[:, :rank].clone())
    begin = now(x.device)
    p = torch.bmm(basis, _matrix(gradients, residuals, side).mT)
    factor = torch.bmm(orthonormal(p), _matrix(gradients, residuals, side))
    rest = _matrix(gradients, residuals, side).baddbmm_(basis.mT, factor, alpha=-1.0)
    residuals.copy_(rest.view(-1))
    torch.bmm(basis.mT, factor)
    return (now(x.device) - begin) / (side * side)


def _matrix(gradients: Tensor, residuals: Tensor, side: int) -> Tensor:
    return (gradients + residuals).view(1, side, side)
