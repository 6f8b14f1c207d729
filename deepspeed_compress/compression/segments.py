"""Stretches of parameters in a flat bucket, and their elements in and out of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PADDING", "Segment", "elements", "gather", "scatter", "stretch"]

PADDING = ""
"""In place of a parameter's name: elements that fill a buffer up and mean nothing."""


@dataclass(frozen=True)
class Segment:
    """`numel` elements of `parameter` from its element `begin` on, at `offset` of the bucket, for rank `owner`."""

    parameter: str
    begin: int
    numel: int
    offset: int
    owner: int


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(offset, numel) of the contiguous stretches that `segments` cover, in their order."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and sum(runs[-1]) == segment.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + segment.numel)
        else:
            runs.append((segment.offset, segment.numel))
    return runs


def gather(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """A new flat fp32 tensor of the elements of `segments`, in their order."""
    parts = [bucket.narrow(0, offset, numel) for offset, numel in _runs(segments)]
    return torch.cat(parts).to(torch.float32) if parts else bucket.new_zeros(0, dtype=torch.float32)


def elements(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """What `gather` returns, but a view of `bucket` where it is fp32 and they are one stretch of it."""
    place = stretch(bucket, segments)
    return gather(bucket, segments) if place is None else place


def stretch(bucket: Tensor, segments: Sequence[Segment]) -> Tensor | None:
    """The elements of `segments` in their place: a view of `bucket` where it is fp32 and they are one stretch of it."""
    runs = _runs(segments)
    return bucket.narrow(0, *runs[0]) if bucket.dtype == torch.float32 and len(runs) == 1 else None


def scatter(values: Tensor, segments: Sequence[Segment], bucket: Tensor) -> None:
    """Copy flat `values` into the elements of `bucket` that `segments` name: the inverse of `gather`."""
    position = 0
    for offset, numel in _runs(segments):
        bucket.narrow(0, offset, numel).copy_(values.narrow(0, position, numel))
        position += numel
