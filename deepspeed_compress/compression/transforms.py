"""Orthonormal changes of basis in which gradients are easier to sparsify or quantize.

They are linear and preserve the norm, so coefficients can be summed over ranks before a single inverse. Every transform
here cuts the message into tiles and maps a tile X [h, w] to A_h X A_w^T, where the matrices A are orthonormal.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import FIRST, NUMEL, MessageTable
from deepspeed_compress.compression.segments import Segment


class Transform(ABC):
    """An orthonormal linear map of flat fp32 vectors: a pure function of the vector and of the map's settings.

    The same layout gives the same bits. A non-finite element makes its whole tile non-finite.
    """

    @abstractmethod
    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return the coefficients (flat fp32 [x.numel()]) of `x`; the result may be `x` itself.

        `x` is flat fp32 and holds the elements of `segments` in order. It is not changed.
        """

    @abstractmethod
    def inverse(self, coefficients: Tensor, segments: Sequence[Segment], out: Tensor | None = None) -> Tensor:
        """Return the vector that has these `coefficients` (not changed).

        The result is written to `out` (contiguous) if given; otherwise it may be `coefficients` itself.
        """

    def of(self, segments: Sequence[Segment]) -> "Transform":
        """Return this map reduced to the settings that `segments` need.

        Two reduced maps compare equal if they give the same coefficients.
        """
        return self


@dataclass(frozen=True)
class Identity(Transform):
    """The identity map: the coefficients are the elements."""

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        return x

    def inverse(self, coefficients: Tensor, segments: Sequence[Segment], out: Tensor | None = None) -> Tensor:
        return coefficients if out is None else out.copy_(coefficients)


@dataclass(frozen=True)
class Hadamard(Transform):
    """Randomized Walsh-Hadamard transform H diag(s) on blocks of `block_size` elements, which is a power of two.

    It spreads an outlier over its block (SDP4Bit, arXiv:2410.15526). H has the entries +-block_size**-0.5 in natural
    order (Sylvester). The signs s are a pure function of `seed` and the same for all blocks. A shorter remainder is
    covered by blocks of descending powers of two. Segments do not matter.
    """

    block_size: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.block_size.bit_count() == 1, f"block_size {self.block_size} is not a power of two"

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        blocks = _powers_of_two(x.numel(), self.block_size)
        return _forward(x * self._signs(x), blocks, for_device(x.device).hadamard_tiles)

    def inverse(self, coefficients: Tensor, segments: Sequence[Segment], out: Tensor | None = None) -> Tensor:
        blocks = _powers_of_two(coefficients.numel(), self.block_size)
        operation = for_device(coefficients.device).hadamard_tiles
        return _inverse(coefficients, blocks, operation, out).mul_(self._signs(coefficients))

    def forward_all(self, x: Tensor, table: MessageTable) -> Tensor:
        """Return the coefficients of the messages of `x`, of which each begins at a multiple of `block_size`."""
        return self._all((x.view(-1, self.block_size) * self._block_signs(x.device)).view(-1), table)

    def inverse_all(self, coefficients: Tensor, table: MessageTable) -> Tensor:
        """Invert `forward_all`."""
        x = self._all(coefficients, table)
        x.view(-1, self.block_size).mul_(self._block_signs(x.device))
        return x

    def _all(self, x: Tensor, table: MessageTable) -> Tensor:
        """Transform all whole blocks at once, and then the blocks of each size of the remainders."""
        out, kernels, size = torch.empty_like(x), for_device(x.device), self.block_size
        width = 1 << size.bit_length() // 2
        shape = (x.numel() // size, 1, size // width, width)
        kernels.hadamard_tiles(x.view(shape), out.view(shape), False)
        for bit in range(size.bit_length() - 1):
            places = table.derive((x.device, size, bit), partial(self._remainders, table, bit, x.device))
            if len(places):
                kernels.hadamard_at(x, out, places, 1 << bit)
        return out

    def _remainders(self, table: MessageTable, bit: int, device: torch.device) -> Tensor:
        """Return where the blocks of 2**`bit` elements of the messages' remainders begin: int64 on `device`."""
        numels = table.rows[:, NUMEL]
        begins = table.rows[:, FIRST] + (numels >> bit + 1 << bit + 1)
        return begins[numels >> bit & 1 == 1].to(device)

    def _signs(self, like: Tensor) -> Tensor:
        """Return +1 or -1 for every element of `like`."""
        return self._block_signs(like.device).repeat(-(-like.numel() // self.block_size))[: like.numel()]

    def _block_signs(self, device: torch.device) -> Tensor:
        uniform: Tensor = for_device(device).uniform(self.block_size, self.seed, device)
        return torch.where(uniform < 0.5, -1.0, 1.0)


@dataclass(frozen=True)
class DCT(Transform):
    """Orthonormal DCT-II of tiles of `tile` x `tile` elements of each matrix (DeMo, arXiv:2411.19870).

    `widths` maps every parameter that is a matrix to its row length; all other parameters are vectors. The whole rows
    of a segment are cut into tiles, with smaller ones at the right and lower edges. Partial rows at the ends of a
    segment, and vectors, are cut into runs of up to `tile` elements.

    Coefficients are ordered by tile, largest tiles first, and row by row within a tile. Full tiles therefore fill
    consecutive blocks of tile**2 elements from the first element on.
    """

    widths: Mapping[str, int] = field(hash=False)
    tile: int = 64

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        return _forward(x, self._tiles(x, segments), for_device(x.device).dct_tiles)

    def inverse(self, coefficients: Tensor, segments: Sequence[Segment], out: Tensor | None = None) -> Tensor:
        operation = for_device(coefficients.device).dct_tiles
        return _inverse(coefficients, self._tiles(coefficients, segments), operation, out)

    def of(self, segments: Sequence[Segment]) -> "DCT":
        names = {segment.parameter for segment in segments}
        return DCT({name: self.widths[name] for name in sorted(names & self.widths.keys())}, self.tile)

    def _tiles(self, x: Tensor, segments: Sequence[Segment]) -> "tuple[Tiles, ...]":
        layout = tuple((part.begin, part.numel, self.widths.get(part.parameter, 0)) for part in segments)
        assert x.numel() == sum(numel for _, numel, _ in layout), f"{x.numel()} elements are not those of {segments}"
        return _matrix_tiles(layout, self.tile)


@dataclass(frozen=True)
class Tiles:
    """A grid of `rows` x `columns` adjacent tiles of `height` x `width` elements.

    The tiles lie in a matrix with row length `stride`; `offset` is the position of the first element in the message.
    """

    offset: int
    rows: int
    columns: int
    height: int
    width: int
    stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns * self.height * self.width

    def of(self, flat: Tensor) -> Tensor:
        """Return the view [rows, columns, height, width] of the contiguous `flat`."""
        sizes = (self.rows, self.columns, self.height, self.width)
        strides = (self.height * self.stride, self.width, self.stride, 1)
        return flat.as_strided(sizes, strides, flat.storage_offset() + self.offset)


_BASES: Mapping[str, type[Identity] | type[Hadamard] | type[DCT]] = {
    "identity": Identity,
    "hadamard": Hadamard,
    "dct": DCT,
}


def described(transform: Transform) -> dict[str, Any]:
    """Return `transform` as plain data for JSON: its name and its settings."""
    name = next(name for name, one in _BASES.items() if one is type(transform))
    return {"basis": name, **{one.name: getattr(transform, one.name) for one in fields(_BASES[name])}}


def transform_of(description: Mapping[str, Any]) -> Transform:
    """Return the transform that `described` describes.

    Raises:
        KeyError, TypeError, ValueError: `description` does not describe a transform.
    """
    given = dict(description)
    kind = given.pop("basis")
    wrong = [name for name, value in given.items() if not _FIELDS[name](value)]
    if wrong:
        raise ValueError(f"{kind}: {wrong[0]} {given[wrong[0]]!r:.60}")
    return _BASES[kind](**given)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1 << 30


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "block_size": lambda value: _is_size(value) and value.bit_count() == 1,
    "seed": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "tile": _is_size,
    "widths": lambda value: isinstance(value, dict) and all(map(_is_size, value.values())),
}
"""Checks of the fields of transforms."""


Operation = Callable[[Tensor, Tensor, bool], None]
"""Function of (tiles [rows, columns, h, w], out of the same shape, inverse) that transforms every tile."""


def _forward(x: Tensor, tiles: Sequence[Tiles], operation: Operation) -> Tensor:
    """Return the coefficients of all tiles, in order."""
    x, coefficients = x.contiguous(), torch.empty_like(x)
    for one, place in _places(tiles, coefficients):
        operation(one.of(x), place, False)
    return coefficients


def _inverse(coefficients: Tensor, tiles: Sequence[Tiles], operation: Operation, out: Tensor | None) -> Tensor:
    """Return the inverse of `_forward`, written to `out` if given."""
    x = torch.empty_like(coefficients) if out is None else out
    for one, place in _places(tiles, coefficients):
        operation(place, one.of(x), True)
    return x


def _places(tiles: Sequence[Tiles], coefficients: Tensor) -> Iterator[tuple[Tiles, Tensor]]:
    """Yield each of `tiles` with the view [rows, columns, h, w] of its part of the flat `coefficients`."""
    parts = torch.split(coefficients, [tile.numel for tile in tiles])
    for one, part in zip(tiles, parts, strict=True):
        yield one, part.view(one.rows, one.columns, one.height, one.width)


def _powers_of_two(numel: int, block_size: int) -> list[Tiles]:
    """Cut `numel` elements into blocks of `block_size`, then into descending powers of two for the remainder.

    A block of n = h * w elements is a tile [h, w], since H_n = H_h (x) H_w (Kronecker product).
    """
    whole, rest = divmod(numel, block_size)
    blocks = [(whole, block_size)] + [(1, 1 << bit) for bit in range(rest.bit_length())[::-1] if rest >> bit & 1]
    tiles, offset = [], 0
    for count, size in blocks:
        width = 1 << size.bit_length() // 2
        tiles.append(Tiles(offset, count, 1, size // width, width, width))
        offset += count * size
    return [tile for tile in tiles if tile.numel]


@lru_cache(maxsize=1024)
def _matrix_tiles(layout: tuple[tuple[int, int, int], ...], tile: int) -> tuple[Tiles, ...]:
    """Return the tiles of the segments (begin, numel, row length or 0 for a vector), largest first."""
    tiles: list[Tiles] = []
    offset = 0
    for begin, numel, width in layout:
        # Whole rows are first .. last - 1 of the matrix. There are none if last <= first, and none in a vector.
        first, last = (-(-begin // width), (begin + numel) // width) if width else (0, 0)
        head = min(numel, first * width - begin) if last > first else 0
        body = (last - first) * width if last > first else 0
        tiles += _cut(offset, 1, head, tile)
        tiles += _cut(offset + head, last - first, width, tile) if body else []
        tiles += _cut(offset + head + body, 1, numel - head - body, tile)
        offset += numel
    return tuple(sorted(tiles, key=lambda one: (-one.height * one.width, one.height, one.width)))


def _cut(offset: int, rows: int, width: int, tile: int) -> list[Tiles]:
    """Cut the matrix [rows, width] at `offset` into full tiles and those at the right edge, lower edge and corner."""
    rest_height, rest_width = rows % tile, width % tile
    below, right = (rows - rest_height) * width, width - rest_width
    parts = (
        Tiles(offset, rows // tile, width // tile, tile, tile, width),
        Tiles(offset + right, rows // tile, 1, tile, rest_width, width),
        Tiles(offset + below, 1, width // tile, rest_height, tile, width),
        Tiles(offset + below + right, 1, 1, rest_height, rest_width, width),
    )
    return [part for part in parts if part.numel]
