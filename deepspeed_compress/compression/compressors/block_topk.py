"""Structured top-k sparsification: groups of neighboring elements are kept or dropped together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor
from deepspeed_compress.compression.compressors.cast import Cast
from deepspeed_compress.compression.compressors.selection import Selection
from deepspeed_compress.compression.kernels import for_device


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
        columns = selection.columns(self._norms(x), for_device(x.device).top_k_rows)
        selection.pack(columns, out[: selection.index_bytes])
        elements, inside = self._elements(selection.positions(columns), x.numel())
        self.values.compress(x[elements].masked_fill_(~inside, 0.0), out[selection.index_bytes :], key)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        selection = self._selection(out.numel())
        elements, inside = self._elements(selection.unpack(payload[: selection.index_bytes]), out.numel())
        values = torch.zeros(len(elements), dtype=torch.float32, device=out.device)
        self.values.decompress_add(payload[selection.index_bytes :], values, scale)
        out.index_add_(0, elements, values.masked_fill_(~inside, 0.0))

    def _norms(self, x: Tensor) -> Tensor:
        """Return the L2 norms of the groups over sqrt(group): fp32 [groups].

        They are computed in fp64, and the division keeps them within the range of fp32.
        """
        whole = x.numel() // self.group * self.group
        parts = (x[:whole].view(-1, self.group), x[whole:].view(1, -1))
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts if part.numel()]
        return torch.cat(norms or [x.double()]).mul_(self.group**-0.5).to(torch.float32)

    def _elements(self, groups: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the elements of `groups` (int64 [k * group]), and a mask of those inside the message.

        Indices beyond the message are clamped to its last element.
        """
        within = torch.arange(self.group, device=groups.device)
        elements = (groups.unsqueeze(1) * self.group + within).view(-1)
        return elements.clamp(max=numel - 1), elements < numel
