"""Random-k sparsification: all ranks draw the same positions, so no index is sent."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor, random_keys
from deepspeed_compress.compression.compressors.cast import Cast
from deepspeed_compress.compression.compressors.selection import Selection
from deepspeed_compress.compression.kernels import for_device

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
