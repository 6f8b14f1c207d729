"""Top-k sparsification; the kept values are sent exactly or quantized."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor
from deepspeed_compress.compression.compressors.cast import Cast
from deepspeed_compress.compression.compressors.selection import Selection
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.forms import ResidualBuffers


@dataclass(frozen=True)
class TopK:
    """Top-k: keeps the ceil(density * n) elements of largest magnitude of every n.

    Source: top-k sparsification with memory, Stich et al. (arXiv:1809.07599, definition 2.1). `scope` sets n: "block"
    selects from every `block_size` elements, which makes indices short; "tensor" selects from the whole message;
    "threshold" selects the same elements as "tensor" with the sampled threshold of Deep Gradient Compression (Lin et
    al., arXiv:1712.01887), which is faster for long messages. NaN counts as the largest magnitude; of equal magnitudes,
    the first ones are kept.

    `values` compresses the kept values of the whole message as one vector. Values with a magnitude below
    `min_magnitude` are sent as zeros, so that the payload size does not depend on the data.

    Payload: packed indices (see `Selection`), then the payload of the values.
    """

    density: float = 0.01
    block_size: int = 4096
    values: Compressor = Cast(torch.float32)  # noqa: RUF009  (frozen, hence safe to share)
    scope: Literal["block", "tensor", "threshold"] = "block"
    min_magnitude: float = 0.0

    @property
    def index_bits(self) -> int:
        """Return the bits per index with scope "block"."""
        return self._selection(self.block_size).index_bits

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
        select = kernels.top_k_sampled if self.scope == "threshold" else kernels.top_k_rows
        columns = selection.columns(x, select)
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
