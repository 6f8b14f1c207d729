"""Base classes of the quantizers: blocks, and the layout of payloads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import (
    FIRST,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    aligned,
    single,
)


class FormQuantizer(ABC):
    """A quantizer with a scale per block of `block_size` elements and a code per element, in a `BlockFormat`.

    The last block may be shorter; it is quantized by itself and never padded. Fused kernels update the residual while
    they encode, and sum the messages of all ranks while they decode. See `BlockFormat` for the payload.
    """

    block_size: int

    @property
    def stochastic(self) -> bool:
        """Return True if rounding is stochastic."""
        return False

    @property
    @abstractmethod
    def form(self) -> BlockFormat:
        """Return the format of blocks, scales and codes."""

    def payload_bytes(self, numel: int) -> int:
        return self.form.message_bytes(numel)

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        self._encode(x, out, key, None)

    def compress_with_feedback(self, x: Tensor, out: Tensor, key: int, residual: ResidualBuffers) -> None:
        """See `FusedFeedback`."""
        self._encode(x, out, key, residual)

    def _encode(self, x: Tensor, out: Tensor, key: int, residual: ResidualBuffers | None) -> None:
        table = single(x.numel(), self.payload_bytes(x.numel()))
        self.compress_all(x, FIRST, out, table, Keys.of_single(key), residual)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        table = single(out.numel(), self.payload_bytes(out.numel()))
        self.decompress_all(payload.unsqueeze(0), table, out, FIRST, scale, add=True)

    def compress_all(
        self, x: Tensor, at: int, out: Tensor, table: MessageTable, keys: Keys, residual: ResidualBuffers | None
    ) -> None:
        """See `ManyMessages`."""
        drawn = keys if self.stochastic else None
        for_device(x.device).quantize_messages(x, at, self.form, out, table, drawn, residual)

    def decompress_all(
        self, payloads: Tensor, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
    ) -> None:
        """See `ManyMessages`."""
        for_device(out.device).dequantize_messages(payloads, self.form, table, out, at, scale, add)


class RowQuantizer(ABC):
    """A quantizer with a few numbers per block of `block_size` elements, defined on the rows of a matrix of blocks.

    The last block may be shorter; it is quantized by itself and never padded. The payload holds the numbers of all
    blocks, block after block, in `scale_dtype`, and then the codes of `bits` bits as a little-endian bit string. Each
    part is padded with zeros to a multiple of 4 bytes.
    """

    block_size: int
    numbers: ClassVar[int] = 1
    """Numbers per block."""

    @property
    def stochastic(self) -> bool:
        """Return True if rounding is stochastic."""
        return False

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the bits per code, 1 to 8."""

    def payload_bytes(self, numel: int) -> int:
        return aligned(self._number_bytes(numel)) + aligned(-(-numel * self.bits // 8))

    def _number_bytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.numbers * self.scale_dtype.itemsize

    def _fields(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of `payload`: its numbers [blocks, numbers], and its codes (uint8) with their padding."""
        size = self._number_bytes(numel)
        return payload[:size].view(self.scale_dtype).view(-1, self.numbers), payload[aligned(size) :]

    @abstractmethod
    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers and codes of `rows` (fp32 [r, b]).

        Args:
            rows: fp32 [r, b].
            noise: fp32 [r, b] in [0, 1) for stochastic quantizers, else None.

        Returns:
            Numbers (fp32 [r, numbers], exact in `scale_dtype`) and codes ([r, b], one byte each, upper bits ignored).
            A row with a non-finite element gets a non-finite number.
        """

    @abstractmethod
    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        """Decode `numbers` (fp32 [r, numbers]) and `codes` (uint8 [r, b]), and add `scale` times the result to `out`.

        `out` is fp32 [r, b].
        """

    def _rows(self, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (blocks, view) for the whole blocks [r, block_size] of `flat`, and for a shorter last one [1, rest]."""
        whole, rest = divmod(flat.numel(), self.block_size)
        if whole:
            yield slice(whole), flat[: whole * self.block_size].view(whole, self.block_size)
        if rest:
            yield slice(whole, whole + 1), flat[-rest:].view(1, rest)

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        kernels = for_device(x.device)
        numbers, code_field = self._fields(out, x.numel())
        out[self._number_bytes(x.numel()) : out.numel() - code_field.numel()].zero_()
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        noise = kernels.uniform(x.numel(), key, x.device) if self.stochastic else None
        for (blocks, rows), (_, code_rows) in zip(self._rows(x), self._rows(codes), strict=True):
            row_noise = None if noise is None else noise[: rows.numel()].view_as(rows)
            noise = None if noise is None else noise[rows.numel() :]
            row_numbers, row_codes = self._quantize(rows, row_noise)
            numbers[blocks] = row_numbers
            code_rows.copy_(row_codes.view(torch.uint8))
        kernels.pack_codes(codes, self.bits, code_field)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        numbers, code_field = self._fields(payload, out.numel())
        codes = for_device(out.device).unpack_codes(code_field, self.bits, out.numel())
        for (blocks, out_rows), (_, code_rows) in zip(self._rows(out), self._rows(codes), strict=True):
            self._dequantize_add(numbers[blocks].to(torch.float32), code_rows, out_rows, scale)
