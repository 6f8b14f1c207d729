"""Reordering of the parameters of a flat buffer that is sharded into equal parts, one per rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import Link


@dataclass(frozen=True)
class _Place:
    """A position in the flat buffer: the rank that holds it, and the offset in this rank's part."""

    rank: int
    offset: int


@dataclass(frozen=True)
class _Move:
    """A run of `numel` elements that is contiguous and within one part both before and afterwards."""

    source: _Place
    target: _Place
    numel: int

    @property
    def back(self) -> "_Move":
        return _Move(self.target, self.source, self.numel)


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
        self._back = tuple(move.back for move in self._moves)

    def forward(self, part: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part after the reordering, as a new tensor like `part`.

        Args:
            part: flat [share], of any dtype and on any device.
            device: device of the messages, which the backend of the group must support.
        """
        return self._moved(part, self._moves, device)

    def backward(self, part: Tensor, device: torch.device) -> Tensor:
        """Invert `forward`."""
        return self._moved(part, self._back, device)

    def _moved(self, part: Tensor, moves: Sequence[_Move], device: torch.device) -> Tensor:
        assert part.shape == (self._share,), f"a part has {self._share} elements, this one is {tuple(part.shape)}"
        rank, peers, given = self._group.rank(), range(self._group.size()), part.to(device)
        leaving = [[move for move in moves if move.source.rank == rank and move.target.rank == peer] for peer in peers]
        arriving = [[move for move in moves if move.target.rank == rank and move.source.rank == peer] for peer in peers]
        outgoing = [_gather(given, leaving[peer]) for peer in peers]
        incoming = [given.new_empty(sum(move.numel for move in arriving[peer])) for peer in peers]
        exchange = Link(self._group).start(_bytes(outgoing), _bytes(incoming), 0)
        exchange.finish()
        incoming[rank] = outgoing[rank]
        result = torch.zeros_like(given)
        for peer in peers:
            _scatter(incoming[peer], arriving[peer], result)
        return result.to(part.device)


def _gather(part: Tensor, moves: Sequence[_Move]) -> Tensor:
    pieces = [part.narrow(0, move.source.offset, move.numel) for move in moves]
    return torch.cat(pieces) if pieces else part.new_empty(0)


def _scatter(values: Tensor, moves: Sequence[_Move], part: Tensor) -> None:
    for move, piece in zip(moves, torch.split(values, [move.numel for move in moves]), strict=True):
        part.narrow(0, move.target.offset, move.numel).copy_(piece)


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(torch.uint8) for tensor in tensors]


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
            yield _Move(_Place(*divmod(source, share)), _Place(*divmod(target, share)), length)
            source, target = source + length, target + length
