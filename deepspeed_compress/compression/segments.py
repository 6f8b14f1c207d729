"""Segments: slices of parameters in a flat bucket, and copies of their elements out of it and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = ""
"""Parameter name of elements that only pad a buffer."""


@dataclass(frozen=True)
class Segment:
    """A slice of `parameter`, elements `begin` to `begin + numel`, at `offset` in the bucket, owned by rank `owner`."""

    parameter: str
    begin: int
    numel: int
    offset: int
    owner: int


def runs_of(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return (offset, numel) of the contiguous slices that `segments` cover, in order."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and sum(runs[-1]) == segment.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + segment.numel)
        else:
            runs.append((segment.offset, segment.numel))
    return runs


def gather(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return a new flat fp32 tensor with the elements of `segments`, in order."""
    parts = [bucket.narrow(0, offset, numel) for offset, numel in runs_of(segments)]
    if len(parts) == 1:
        return parts[0].to(torch.float32, copy=True)
    return torch.cat(parts).to(torch.float32) if parts else bucket.new_zeros(0, dtype=torch.float32)


def elements(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return what `gather` returns, as a view if `bucket` is fp32 and the segments are contiguous in it."""
    view = contiguous_view(bucket, segments)
    return gather(bucket, segments) if view is None else view


def contiguous_view(bucket: Tensor, segments: Sequence[Segment]) -> Tensor | None:
    """Return the elements of `segments` as a view of `bucket`, or None if it is not fp32 or they are not contiguous."""
    runs = runs_of(segments)
    return bucket.narrow(0, *runs[0]) if bucket.dtype == torch.float32 and len(runs) == 1 else None


def scatter(values: Tensor, segments: Sequence[Segment], bucket: Tensor) -> None:
    """Copy flat `values` into the elements of `segments` in `bucket`; the inverse of `gather`."""
    position = 0
    for offset, numel in runs_of(segments):
        bucket.narrow(0, offset, numel).copy_(values.narrow(0, position, numel))
        position += numel
