"""Sparsifiers, which send a few elements of each block, and how they select elements and pack their indices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor, random_keys
from deepspeed_compress.compression.compressors.quantizers import Cast
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import ResidualBuffers, aligned


@dataclass(frozen=True)
class Selection:
    """Selection of ceil(density * width) elements of every block of width `block_size`, whatever the values.

    The last block of the `numel` elements may be shorter. Indices are relative to their block, so they take
    ceil(log2(block_size)) bits.
    """

    numel: int
    block_size: int
    density: float

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return (blocks, width, kept per block) for the whole blocks, and for the shorter last one if there is one.

        The slack of 1e-9 undoes binary fractions: 0.07 * 100 keeps 7, not 8.
        """
        whole, rest = divmod(self.numel, self.block_size)
        blocks = [(count, width) for count, width in ((whole, self.block_size), (1, rest)) if count * width]
        return [(count, width, min(width, max(1, math.ceil(self.density * width - 1e-9)))) for count, width in blocks]

    @property
    def kept(self) -> int:
        return sum(count * kept for count, _, kept in self.parts)

    @property
    def index_bits(self) -> int:
        return (self.block_size - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        return aligned(-(-self.kept * self.index_bits // 8))

    def columns(self, x: Tensor, select: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the block-relative indices (int64 [kept]) that `select` chooses.

        `select` takes rows of `x` and k, and returns int64 [rows, k].
        """
        found = [select(x[part].view(shape), kept).view(-1) for part, shape, kept in self._rows()]
        return torch.cat(found or [x.new_empty(0, dtype=torch.int64)])

    def columns_of_sum(self, x: Tensor, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
        """Return the block-relative indices of the largest elements of the sum `x` + decay * before, and their values.

        The whole sum is written to `after`. Indices are int64 [kept], values fp32 [kept].
        """
        found = [(x.new_empty(0, dtype=torch.int64), x.new_empty(0))]
        for part, shape, kept in self._rows():
            inside = ResidualBuffers(residual.before[part], residual.decay, residual.after[part])
            columns, values = for_device(x.device).top_k_rows_of_sum(x[part].view(shape), kept, inside)
            found.append((columns.view(-1), values.view(-1)))
        columns, values = zip(*found, strict=True)
        return torch.cat(columns), torch.cat(values)

    def _rows(self) -> Iterator[tuple[slice, tuple[int, int], int]]:
        """Yield (slice of the elements, their shape [rows, width], kept per row) for each of `parts`."""
        begin = 0
        for count, width, kept in self.parts:
            yield slice(begin, begin + count * width), (count, width), kept
            begin += count * width

    def positions(self, columns: Tensor) -> Tensor:
        """Return the absolute indices of the block-relative `columns`, both int64 [kept]."""
        starts, begin = [columns.new_empty(0)], 0
        for count, width, kept in self.parts:
            first = torch.arange(begin, begin + count * width, width, device=columns.device)
            starts.append(first.repeat_interleave(kept))
            begin += count * width
        return columns + torch.cat(starts)

    def pack(self, columns: Tensor, out: Tensor) -> None:
        """Pack `columns` into `out` (uint8 [index_bytes])."""
        for_device(columns.device).pack_bits(columns, self.index_bits, out)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the absolute indices of packed columns: int64 [kept]."""
        return self.positions(for_device(packed.device).unpack_bits(packed, self.index_bits, self.kept))


@dataclass(frozen=True)
class TopK:
    """Top-k: keeps the ceil(density * n) elements of largest magnitude of every n.

    Source: top-k sparsification with memory, Stich et al. (arXiv:1809.07599, definition 2.1). `scope` sets n: "block"
    selects from every `block_size` elements, which makes indices short; "tensor" and "threshold" select from the whole
    message, as the threshold of Deep Gradient Compression does (Lin et al., arXiv:1712.01887). NaN counts as the
    largest magnitude; of equal magnitudes, the first ones are kept.

    `values` compresses the kept values of the whole message as one vector. Values with a magnitude below
    `min_magnitude` are sent as zeros, so that the payload size does not depend on the data.

    Payload: packed indices (see `Selection`), then the payload of the values.
    """

    density: float = 0.01
    block_size: int = 4096
    values: Compressor = Cast(torch.float32)  # noqa: RUF009  (frozen, hence safe to share)
    scope: Literal["block", "tensor", "threshold"] = "block"
    min_magnitude: float = 0.0

    def _selection(self, numel: int) -> Selection:
        return Selection(numel, self.block_size if self.scope == "block" else max(numel, 1), self.density)

    def kept(self, numel: int) -> int:
        """Return exactly how many of `numel` elements are kept, whatever their values."""
        return self._selection(numel).kept

    def payload_bytes(self, numel: int) -> int:
        selection = self._selection(numel)
        return selection.index_bytes + self.values.payload_bytes(selection.kept)

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        selection, kernels = self._selection(x.numel()), for_device(x.device)
        columns = selection.columns(x, kernels.top_k_rows)
        selection.pack(columns, out[: selection.index_bytes])
        self._send(x[selection.positions(columns)], out[selection.index_bytes :], key)

    def compress_with_feedback(self, x: Tensor, out: Tensor, key: int, residual: ResidualBuffers) -> None:
        """See `FusedFeedback`. The residual is written once, and again at the positions that were sent."""
        selection = self._selection(x.numel())
        columns, values = selection.columns_of_sum(x, residual)
        selection.pack(columns, out[: selection.index_bytes])
        payload = out[selection.index_bytes :]
        self._send(values, payload, key)
        self.values.decompress_add(payload, values, -1.0)
        left = torch.empty(values.numel(), dtype=residual.after.dtype, device=x.device)
        for_device(x.device).cast(values, left)
        residual.after.index_copy_(0, selection.positions(columns), left)

    def _send(self, values: Tensor, out: Tensor, key: int) -> None:
        """Encode the kept `values` into `out`, with those below `min_magnitude` set to zero."""
        self.values.compress(values.masked_fill(values.abs() < self.min_magnitude, 0.0), out, key)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        selection = self._selection(out.numel())
        values = torch.zeros(selection.kept, dtype=torch.float32, device=out.device)
        self.values.decompress_add(payload[selection.index_bytes :], values, scale)
        out.index_add_(0, selection.unpack(payload[: selection.index_bytes]), values)


@dataclass(frozen=True)
class BlockTopK:
    """Top-k of groups: of every m groups of `group` neighbors, keeps the ceil(density * m) with the largest L2 norm.

    Source: top-k of Stich et al. (arXiv:1809.07599, definition 2.1), with groups in place of elements. A block of
    `block_size` elements, which is a multiple of `group`, holds m groups, so one index of log2(m) bits serves a whole
    group of values. NaN counts as the largest norm; of equal norms, the first ones are kept. The last group may be
    shorter; if it is kept, it is padded with zeros.

    Payload: packed indices of groups (see `Selection`), then the payload of the values of all kept groups as one
    vector.
    """

    density: float = 0.01
    block_size: int = 65536
    group: int = 32
    values: Compressor = Cast(torch.float32)  # noqa: RUF009  (frozen, hence safe to share)

    def __post_init__(self) -> None:
        assert self.block_size % self.group == 0, f"blocks of {self.block_size} are not whole groups of {self.group}"

    def _selection(self, numel: int) -> Selection:
        """Return the selection among the groups of a message of `numel` elements."""
        return Selection(-(-numel // self.group), self.block_size // self.group, self.density)

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements are kept; fewer if the shorter last group displaces a full one."""
        parts = self._selection(numel).parts
        forced = any(width == kept for _, width, kept in parts[-1:])
        return self._sent(numel) - (-numel % self.group if forced else 0)

    def _sent(self, numel: int) -> int:
        """Return the number of values in a payload."""
        return self._selection(numel).kept * self.group

    def payload_bytes(self, numel: int) -> int:
        return self._selection(numel).index_bytes + self.values.payload_bytes(self._sent(numel))

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        selection = self._selection(x.numel())
        whole = x.numel() // self.group * self.group
        groups = (x[:whole].view(-1, self.group), x[whole:].view(1, -1))
        # In fp64, and over sqrt(group), which keeps norms within the range of fp32.
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in groups if part.numel()]
        norm = torch.cat(norms or [x.double()]).mul_(self.group**-0.5).to(torch.float32)
        columns = selection.columns(norm, for_device(x.device).top_k_rows)
        selection.pack(columns, out[: selection.index_bytes])
        elements, inside = self._elements(selection.positions(columns), x.numel())
        self.values.compress(x[elements].masked_fill_(~inside, 0.0), out[selection.index_bytes :], key)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        selection = self._selection(out.numel())
        elements, inside = self._elements(selection.unpack(payload[: selection.index_bytes]), out.numel())
        values = torch.zeros(len(elements), dtype=torch.float32, device=out.device)
        self.values.decompress_add(payload[selection.index_bytes :], values, scale)
        out.index_add_(0, elements, values.masked_fill_(~inside, 0.0))

    def _elements(self, groups: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the elements of `groups` (int64 [k * group]), and a mask of those inside the message.

        Indices beyond the message are clamped to its last element.
        """
        within = torch.arange(self.group, device=groups.device)
        elements = (groups.unsqueeze(1) * self.group + within).view(-1)
        return elements.clamp(max=numel - 1), elements < numel


_SEED_BYTES = 4
_DRAWS = 2
"""Random keys per part: one for its columns and one for its shifts."""


@dataclass(frozen=True)
class RandomK:
    """Random-k: keeps k = ceil(density * n) of every block of n elements, drawn without replacement.

    Source: Stich et al. (arXiv:1809.07599, definition 2.1): E|x - C(x)|^2 = (1 - k/n) |x|^2, for use with error
    feedback. With `rescale`, the receiver multiplies by n/k, which makes it unbiased: the subsampling of Konecny et al.
    (arXiv:1610.05492, section 3), for use without error feedback.

    The draw depends only on the upper 32 bits of the key, which are the same on all ranks. In every block it is a
    uniformly random set of k columns: one set for all whole blocks, rotated by a random shift in each. A non-finite
    element anywhere makes the first value NaN. Values that `rescale` takes beyond the range of fp32 saturate.

    Payload: those 32 bits, then the payload of the values of all blocks as one vector. The positions are drawn on the
    device from the bits in the payload, so the host does not wait for a message.
    """

    density: float = 0.01
    block_size: int = 4096
    values: Compressor = Cast(torch.float32)  # noqa: RUF009  (frozen, hence safe to share)
    rescale: bool = False

    def _selection(self, numel: int) -> Selection:
        return Selection(numel, self.block_size, self.density)

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements are kept."""
        return self._selection(numel).kept

    def payload_bytes(self, numel: int) -> int:
        return _SEED_BYTES + self.values.payload_bytes(self.kept(numel)) if numel else 0

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        if not x.numel():
            return
        seed = key >> 32
        out[:_SEED_BYTES].view(torch.int32).fill_(seed - (seed >> 31 << 32))
        values = x[self._positions(x, out)]
        values[0] += 0.0 * torch.linalg.vector_norm(x, math.inf)
        self.values.compress(values, out[_SEED_BYTES:], key)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        if not out.numel():
            return
        positions = self._positions(out, payload)
        values = torch.zeros(len(positions), dtype=torch.float32, device=out.device)
        self.values.decompress_add(payload[_SEED_BYTES:], values, 1.0)
        if self.rescale:
            self._rescale(values, out.numel())
        out.index_add_(0, positions, values, alpha=scale)

    def _positions(self, like: Tensor, payload: Tensor) -> Tensor:
        """Return the indices of the kept elements of `like`, drawn from the 32 bits in `payload`: int64 [kept]."""
        selection, kernels = self._selection(like.numel()), for_device(like.device)
        seed = payload[:_SEED_BYTES].view(torch.int32)[0].to(torch.int64) & 0xFFFFFFFF
        columns, keys = [], random_keys(seed, len(selection.parts), _DRAWS).view(-1)
        for part, (count, width, kept) in enumerate(selection.parts):
            noise = kernels.uniform(width, keys[_DRAWS * part], like.device)
            shifts = kernels.uniform(count, keys[_DRAWS * part + 1], like.device).mul_(width).to(torch.int64)
            columns.append((kernels.top_k_rows(noise.view(1, -1), kept) + shifts.unsqueeze(1)) % width)
        return selection.positions(torch.cat([part.view(-1) for part in columns]))

    def _rescale(self, values: Tensor, numel: int) -> None:
        """Multiply `values` by n/k of their blocks, within the range of fp32."""
        largest, begin = torch.finfo(torch.float32).max, 0
        for count, width, kept in self._selection(numel).parts:
            values[begin : begin + count * kept].mul_(width / kept)
            begin += count * kept
        values.clamp_(-largest, largest)
