"""Reordering of the parameters of a flat buffer that is sharded into equal parts, one per rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import exchange

_Move = tuple[int, int, int]
"""A run of elements that is within one part in either order: its places in the flat buffer in each, and its length."""


class Reordering:
    """Collective conversion of a sharded flat buffer between two orders of its parameters.

    Args:
        group: ranks that hold the parts.
        before: (name, numel) of the parameters in the first order, without gaps.
        after: (name, numel) of the same parameters in the second order.
        share: number of elements per rank. Elements after the last parameter are padding and become 0.
    """

    def __init__(
        self, group: ProcessGroup, before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]], share: int
    ) -> None:
        assert sorted(before) == sorted(after), "`before` and `after` have different parameters"
        self._group = group
        self._share = share
        self._moves = tuple(_moves(before, after, share))

    def forward(self, part: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part after the reordering, as a new tensor like `part`.

        Args:
            part: flat [share], of any dtype and on any device.
            device: device of the messages, which the backend of the group must support.
        """
        return self._moved(part, self._moves, device)

    def backward(self, part: Tensor, device: torch.device) -> Tensor:
        """Invert `forward`."""
        return self._moved(part, [(target, source, numel) for source, target, numel in self._moves], device)

    def _moved(self, part: Tensor, moves: Sequence[_Move], device: torch.device) -> Tensor:
        assert part.shape == (self._share,), f"a part has {self._share} elements, this one is {tuple(part.shape)}"
        rank, share, given = self._group.rank(), self._share, part.to(device)
        result, nothing = torch.zeros_like(given), given.new_empty(0)
        leaving, arriving = ([[nothing] for _ in range(self._group.size())] for _ in range(2))
        for source, target, numel in moves:
            if source // share == rank:
                leaving[target // share].append(given.narrow(0, source % share, numel))
            if target // share == rank:
                arriving[source // share].append(result.narrow(0, target % share, numel))
        outgoing = [torch.cat(pieces) for pieces in leaving]
        incoming = [given.new_empty(sum(piece.numel() for piece in pieces)) for pieces in arriving]
        exchange(self._group, [one.view(torch.uint8) for one in outgoing], [one.view(torch.uint8) for one in incoming])
        incoming[rank] = outgoing[rank]
        for values, pieces in zip(incoming, arriving, strict=True):
            for piece, value in zip(pieces, torch.split(values, [one.numel() for one in pieces]), strict=True):
                piece.copy_(value)
        return result.to(part.device)


def _moves(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]], share: int) -> Iterator[_Move]:
    """Yield runs of the parameters, cut at the boundaries between parts in either order."""
    begins, end = {}, 0
    for name, numel in after:
        begins[name], end = end, end + numel
    source = 0
    for name, numel in before:
        target, stop = begins[name], source + numel
        while source < stop:
            length = min(stop - source, share - source % share, share - target % share)
            yield source, target, length
            source, target = source + length, target + length
