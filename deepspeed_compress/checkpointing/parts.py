"""Resharding of flat parts for another number of ranks, by the names of parameters instead of positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.errors import StateError


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `begin + numel` of the parameter `name`, which `start` at that index in a flat part."""

    name: str
    begin: int
    start: int
    numel: int


def even_piece(name: str, numel: int, rank: int, ranks: int, start: int) -> tuple[Piece, int]:
    """Return the part of an evenly sharded parameter that `rank` holds, and the room that it occupies from `start`.

    The parameter has `numel` elements on `ranks` ranks. The last ranks may hold fewer elements or none, and pad their
    room (as ZeRO 3 does).
    """
    share = -(-numel // ranks)
    begin = min(rank * share, numel)
    return Piece(name, begin, start, min(share, numel - begin)), share


class Fragments:
    """Values of one kind that were read, such as fp32 master weights, by parameter.

    Tensors are views until `cut` copies them.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, pieces: Iterable[Piece], part: Tensor) -> None:
        """Add `pieces` of the flat `part` of one rank."""
        for piece in pieces:
            values = part.narrow(0, piece.start, piece.numel)
            self._found.setdefault(piece.name, []).append((piece.begin, values))

    def cut(self, pieces: Sequence[Piece], size: int) -> Tensor:
        """Return a new flat part of `size` elements that holds `pieces`, with zeros between them.

        Raises:
            StateError: elements of a piece have not been read.
        """
        found = {piece.name: self._found.get(piece.name, []) for piece in pieces}
        dtype = next((values.dtype for some in found.values() for _, values in some), torch.float32)
        part = torch.zeros(size, dtype=dtype)
        for piece in pieces:
            target = part.narrow(0, piece.start, piece.numel)
            filled = sum(_copy(target, piece.begin, begin, values) for begin, values in found[piece.name])
            if filled != piece.numel:
                raise StateError(
                    f"the checkpoint has {filled} of the elements {piece.begin} to {piece.begin + piece.numel} of "
                    f"{piece.name}: it belongs to another model, or one of its files belongs to another save"
                )
        return part


def _copy(target: Tensor, first: int, begin: int, values: Tensor) -> int:
    """Copy the overlap of `values`, from element `begin` on, to `target`, from element `first` on. Return its size."""
    low, high = max(first, begin), min(first + target.numel(), begin + values.numel())
    if low < high:
        target[low - first : high - first] = values[low - begin : high - begin]
    return max(0, high - low)
