"""Flat parts of what ranks hold, cut anew for another number of ranks: by the names of parameters, not by places."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.errors import StateError

__all__ = ["Fragments", "Piece", "even_piece"]


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `begin + numel` of the parameter `name`, and where they `start` in a flat part."""

    name: str
    begin: int
    start: int
    numel: int


def even_piece(name: str, numel: int, rank: int, ranks: int, start: int) -> tuple[Piece, int]:
    """What `rank` of `ranks` holds of a parameter of `numel` elements that is divided evenly, and the room that this
    takes from `start` on: the last ranks may hold less, or nothing, and pad it (as ZeRO 3 does)."""
    share = -(-numel // ranks)
    begin = min(rank * share, numel)
    return Piece(name, begin, start, min(share, numel - begin)), share


class Fragments:
    """What has been read of one kind of values, such as masters, by parameter. Tensors are views, and copied last."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, pieces: Iterable[Piece], part: Tensor) -> None:
        """`part`, flat, of one rank."""
        for piece in pieces:
            values = part.narrow(0, piece.start, piece.numel)
            self._found.setdefault(piece.name, []).append((piece.begin, values))

    def cut(self, pieces: Sequence[Piece], size: int) -> Tensor:
        """A new flat part of `size` elements that holds `pieces`; zero between them.

        Raises StateError where something of a piece has not been read.
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
                    f"{piece.name}: it is of another model, or a file of it is of another save"
                )
        return part


def _copy(target: Tensor, first: int, begin: int, values: Tensor) -> int:
    """Into `target`, which begins at element `first`, what `values` from element `begin` on have of it; how much."""
    low, high = max(first, begin), min(first + target.numel(), begin + values.numel())
    if low < high:
        target[low - first : high - first] = values[low - begin : high - begin]
    return max(0, high - low)
