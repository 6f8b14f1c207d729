"""Codec of weight updates: the change between two versions of a flat tensor, exact or lossy, as bytes.

Values are compared as integers of the same width (int16 for bf16 and fp16, int32 for fp32), so NaN payloads and -0.0
survive. A changed value is sent as the wrapping difference of these integers. At small learning rates most values move
to the neighboring number, and so their differences are +1 or -1, which take about one bit after entropy coding; the xor
of the same values would take two.

A payload is a header and a list of sections. There are three exact layouts, and a lossy one:

- `SPARSE`: the positions of the changed values as an Elias-Fano code (Vigna, "Quasi-succinct indices",
  arXiv:1206.4300), then their differences. A position takes about 2 + log2(numel / changed) bits, within half a bit of
  the entropy of random positions, and all steps are vectorized.
- `DENSE`: the differences of all values, which is shorter if more than a quarter of them changed.
- `WHOLE`: all values themselves, for a full copy.
- `BLOCKWISE_4`, `BLOCKWISE_8`: the differences of all values in blocks of integers of 4 or 8 bits, as the method
  `blockwise` sends gradients, if that is shorter. Both sides add them by the same function, so they hold the same bits.

Integers are split into planes of equal significance, because the upper bytes of differences, and the exponents of
values, compress well on their own. Each section is compressed by zstandard if that makes it smaller.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_compress.compression.compressors.quantizers import Blockwise
from deepspeed_compress.compression.kernels.reference_bits import pack_bits, unpack_bits
from deepspeed_compress.errors import RolloutError

MAX_NUMEL = 1 << 28
"""Largest number of elements of one encoded tensor."""
_SPARSE_UP_TO = 0.25
"""Largest share of changed values for which positions are sent. Above it, the differences of all values are shorter."""
_BLOCK_SIZE = 256
"""Number of values that share a scale in lossy changes."""
_ZSTD_LEVEL = 1
"""Compression level. Higher levels are several times slower, and less than 2 % smaller on such data."""
_HEADER = struct.Struct("<4sBBII")
_MAGIC = b"dsrc"
_SECTION = struct.Struct("<BI")
_INTEGERS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
"""Integer type of the same width, by bytes per value."""

Integers = NDArray[np.signedinteger]
Bytes = NDArray[np.uint8]


class ChangeError(RolloutError):
    """Payload that is malformed, or made for another tensor than the held one."""


class Layout(IntEnum):
    """Content of a payload."""

    SPARSE = 0
    DENSE = 1
    WHOLE = 2
    BLOCKWISE_4 = 3
    BLOCKWISE_8 = 4


_BITS: Mapping[Layout, int] = {Layout.BLOCKWISE_4: 4, Layout.BLOCKWISE_8: 8}
"""Bits per value of the lossy layouts."""


@dataclass(frozen=True)
class Header:
    """Description of a payload.

    Attributes:
        layout: the content.
        item_bytes: bytes per value, 2 or 4.
        numel: number of values of the tensor.
        changed: number of values that differ from the old ones; all of them in a full copy.
    """

    layout: Layout
    item_bytes: int
    numel: int
    changed: int

    @property
    def low_bits(self) -> int:
        """Return the bits of a position that are packed as they are; the others are coded in unary."""
        return (self.numel // self.changed).bit_length() - 1 if self.changed else 0

    @property
    def low_bytes(self) -> int:
        return -(-self.changed * self.low_bits // 8)

    @property
    def high_bits(self) -> int:
        """Return the length of the bitmap of the upper bits of positions."""
        return ((self.numel - 1) >> self.low_bits) + self.changed if self.changed else 0

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.layout, self.item_bytes, self.numel, self.changed)


def encode(old: Tensor | None, new: Tensor) -> bytes:
    """Return the change from `old` to `new` as bytes, or a full copy of `new` if `old` is None.

    Args:
        old: the version that the receiver holds; of the same type and size as `new`.
        new: a flat, contiguous tensor of bf16, fp16 or fp32 on the CPU.
    """
    values = _integers(new)
    if old is None:
        header = Header(Layout.WHOLE, values.itemsize, values.size, values.size)
        return b"".join([header.pack(), *_planes(values)])
    held = _integers(old)
    positions = np.flatnonzero(held != values)
    layout = Layout.SPARSE if positions.size <= _SPARSE_UP_TO * values.size else Layout.DENSE
    header = Header(layout, values.itemsize, values.size, positions.size)
    if layout is Layout.DENSE:
        return b"".join([header.pack(), *_planes(_zigzag(values - held))])
    if not positions.size:
        return header.pack()
    differences = _zigzag(values[positions] - held[positions])
    return b"".join([header.pack(), *_code_positions(header, positions), *_planes(differences)])


def encode_lossy(old: Tensor, new: Tensor, bits: int) -> bytes:
    """Return a change from `old` towards `new` as bytes, and set `new` to the values that it leads to.

    This is the exact change if that is shorter, or if a difference or a value that it leads to is not finite.

    Args:
        old: the version that the receiver holds; of the same type and size as `new`.
        new: a flat, contiguous tensor of bf16, fp16 or fp32 on the CPU.
        bits: bits per value, 4 or 8.
    """
    exact = encode(old, new)
    difference = new.to(torch.float32) - old.to(torch.float32)
    if not difference.isfinite().all():
        return exact
    compressor, reached = Blockwise(bits, _BLOCK_SIZE), old.clone()
    codes = torch.zeros(compressor.payload_bytes(old.numel()), dtype=torch.uint8)
    compressor.compress(difference, codes, 0)
    _add(compressor, codes, reached)
    if not reached.isfinite().all():
        return exact
    changed = int(np.count_nonzero(_integers(reached) != _integers(old)))
    layout = next(layout for layout, own in _BITS.items() if own == bits)
    header = Header(layout, old.element_size(), old.numel(), changed)
    payload = header.pack() + _section(codes.numpy().tobytes())
    if len(exact) <= len(payload):
        return exact
    new.copy_(reached)
    return payload


def apply(payload: bytes, held: Tensor) -> NDArray[np.int64] | None:
    """Bring `held` to the version that `payload` leads to, in place. If this raises, `held` is unchanged.

    Args:
        payload: bytes of `encode`.
        held: a flat, contiguous tensor on the CPU with the old version's values; with any values for a full copy.

    Returns:
        The positions of the changed values, in ascending order; None if the payload has no positions.

    Raises:
        ChangeError: the payload is malformed or made for a tensor of another size or width.
    """
    header, values = _read_header(payload), _integers(held)
    if (header.item_bytes, header.numel) != (values.itemsize, values.size):
        made_for = f"the change is for {header.numel} values of {header.item_bytes} bytes"
        raise ChangeError(f"{made_for}, but {values.size} values of {values.itemsize} bytes are held")
    sections = _Sections(payload)
    if header.layout is Layout.SPARSE:
        positions = _decode_positions(header, sections) if header.changed else np.empty(0, np.int64)
        differences = _unzigzag(sections.integers(positions.size, header.item_bytes))
        sections.end()
        values[positions] += differences
        return positions
    if header.layout in _BITS:
        compressor = Blockwise(_BITS[header.layout], _BLOCK_SIZE)
        codes = torch.from_numpy(sections.take(compressor.payload_bytes(header.numel)))
        sections.end()
        _add(compressor, codes, held)
        return None
    found = sections.integers(header.numel, header.item_bytes)
    sections.end()
    if header.layout is Layout.DENSE:
        values += _unzigzag(found)
    else:
        values[:] = found
    return None


def _add(compressor: Blockwise, codes: Tensor, held: Tensor) -> None:
    """Add the decoded differences to `held` in fp32, and round the sum to its type, in place."""
    total = held.to(torch.float32)
    compressor.decompress_add(codes, total, 1.0)
    held.copy_(total)


def count_changed(payload: bytes) -> int:
    """Return how many values a payload changes.

    Raises:
        ChangeError: the header is malformed.
    """
    return _read_header(payload).changed


def _read_header(payload: bytes) -> Header:
    if len(payload) < _HEADER.size:
        raise ChangeError(f"a change has a header of {_HEADER.size} bytes, but this one has {len(payload)} in all")
    magic, layout, item_bytes, numel, changed = _HEADER.unpack_from(payload)
    known = magic == _MAGIC and layout in list(Layout) and item_bytes in _INTEGERS
    if not known or numel > MAX_NUMEL or changed > numel:
        raise ChangeError("the header of a change is malformed, or from another version of this package")
    return Header(Layout(layout), item_bytes, numel, changed)


def _integers(tensor: Tensor) -> Integers:
    """Return the bits of `tensor` as signed integers that share its memory."""
    found: Integers = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
    return found


def _zigzag(differences: Integers) -> Integers:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that small differences have upper bytes of zero."""
    return (differences << 1) ^ (differences >> (8 * differences.itemsize - 1))


def _unzigzag(codes: Integers) -> Integers:
    unsigned = codes.view(f"u{codes.itemsize}")
    found: Integers = (unsigned >> 1).view(codes.dtype) ^ -(codes & 1)
    return found


def _code_positions(header: Header, positions: NDArray[np.int64]) -> list[bytes]:
    """Return the sections of an Elias-Fano code: packed lower bits, and a bitmap of the upper bits.

    Position number i sets the bit `(position >> low_bits) + i` of the bitmap.
    """
    low = torch.zeros(header.low_bytes, dtype=torch.uint8)
    if header.low_bits:
        pack_bits(torch.from_numpy(positions & ((1 << header.low_bits) - 1)), header.low_bits, low)
    bitmap = np.zeros(header.high_bits, np.uint8)
    bitmap[(positions >> header.low_bits) + np.arange(positions.size)] = 1
    return [_section(low.numpy().tobytes()), _section(np.packbits(bitmap).tobytes())]


def _decode_positions(header: Header, sections: "_Sections") -> NDArray[np.int64]:
    low = torch.from_numpy(sections.take(header.low_bytes))
    bitmap = np.unpackbits(sections.take(-(-header.high_bits // 8)), count=header.high_bits)
    ones = np.flatnonzero(bitmap)
    if ones.size != header.changed:
        raise ChangeError(f"a change has {ones.size} positions for {header.changed} values")
    positions: NDArray[np.int64] = (ones - np.arange(ones.size)) << header.low_bits
    if header.low_bits:
        positions |= unpack_bits(low, header.low_bits, header.changed).numpy()
    if positions[-1] >= header.numel or np.any(positions[1:] <= positions[:-1]):
        raise ChangeError("the positions of a change are not ascending within the tensor")
    return positions


def _planes(integers: Integers) -> list[bytes]:
    """Return one section for all lowest bytes of `integers`, one for the next higher ones, and so on; none for none."""
    columns = integers.view(np.uint8).reshape(-1, integers.itemsize)
    return [_section(columns[:, place].tobytes()) for place in range(integers.itemsize if integers.size else 0)]


def _section(raw: bytes) -> bytes:
    """Return a section: a flag for compression, the length, and the bytes."""
    coded = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    pays = len(coded) < len(raw)
    return _SECTION.pack(pays, min(len(coded), len(raw))) + (coded if pays else raw)


class _Sections:
    """Reader of the sections of a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = memoryview(payload)
        self._place = _HEADER.size

    def take(self, size: int) -> Bytes:
        """Return the next section as a writable array of `size` bytes.

        Raises:
            ChangeError: it has another size. This is known before any memory is allocated.
        """
        if len(self._payload) - self._place < _SECTION.size:
            raise ChangeError("a change ends before its last section")
        coded, length = _SECTION.unpack_from(self._payload, self._place)
        begin = self._place + _SECTION.size
        self._place = begin + length
        if self._place > len(self._payload):
            raise ChangeError("a change ends within a section")
        raw = self._payload[begin : self._place]
        if not coded and length != size:
            raise ChangeError(f"a section of a change has {length} bytes instead of {size}")
        return np.frombuffer(bytearray(_decompress(raw, size) if coded else raw), np.uint8)

    def integers(self, count: int, item_bytes: int) -> Integers:
        """Return `count` integers from their planes."""
        columns = np.empty((count, item_bytes), np.uint8)
        for place in range(item_bytes if count else 0):
            columns[:, place] = self.take(count)
        found: Integers = columns.view(f"<i{item_bytes}").reshape(-1)
        return found

    def end(self) -> None:
        """Check that the payload has no further sections.

        Raises:
            ChangeError: it has.
        """
        if self._place != len(self._payload):
            raise ChangeError(f"a change has {len(self._payload) - self._place} bytes after its last section")


def _decompress(coded: memoryview, size: int) -> bytes:
    try:
        announced = zstandard.frame_content_size(coded)
        if announced != size:
            raise ChangeError(f"a section of a change would have {announced} bytes instead of {size}")
        return zstandard.ZstdDecompressor().decompress(coded)
    except zstandard.ZstdError as error:
        raise ChangeError(f"a section of a change cannot be decompressed: {error}") from error
