"""Base classes of the quantizers: blocks, payload layout, scales, and symmetric levels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import aligned
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import (
    FIRST,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    single,
)


class BlockQuantizer(ABC):
    """A quantizer with a few numbers (scales) per block of `block_size` elements and a code per element.

    The last block may be shorter; it is quantized by itself and never padded. The payload holds the numbers of all
    blocks, block after block, in `scale_dtype`, and then the codes of `code_bits` bits as a little-endian bit string.
    Each part is padded with zeros to a multiple of 4 bytes.
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
    def code_bits(self) -> int:
        """Return the bits per code, 1 to 8."""

    def payload_bytes(self, numel: int) -> int:
        return aligned(self._number_bytes(numel)) + aligned(self._code_bytes(numel))

    def _number_bytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.numbers * self.scale_dtype.itemsize

    def _code_bytes(self, numel: int) -> int:
        return -(-numel * self.code_bits // 8)

    def _fields(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of `payload`: its numbers, flat in `scale_dtype`, and its codes (uint8) with their padding."""
        size = self._number_bytes(numel)
        return payload[:size].view(self.scale_dtype), payload[aligned(size) :]

    def _clear_padding(self, payload: Tensor, numel: int) -> None:
        """Set the bytes between the numbers and the codes of `payload` to zero."""
        size = self._number_bytes(numel)
        if size < aligned(size):
            payload[size : aligned(size)].zero_()

    @abstractmethod
    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        """See `Compressor`."""

    @abstractmethod
    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        """See `Compressor`."""


class FormQuantizer(BlockQuantizer):
    """A quantizer with fused kernels: encoding updates the residual, and decoding sums the messages of all ranks."""

    @property
    @abstractmethod
    def form(self) -> BlockFormat:
        """Return the format of blocks, scales and codes."""

    @property
    def code_bits(self) -> int:
        return self.form.bits

    def _code_bytes(self, numel: int) -> int:
        return self.form.code_bytes(numel)

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
        kernels, drawn = for_device(x.device), keys if self.stochastic else None
        kernels.quantize_messages(x, at, self.form, self.scale_dtype, out, table, drawn, residual)

    def decompress_all(
        self, payloads: Tensor, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
    ) -> None:
        """See `ManyMessages`."""
        for_device(out.device).dequantize_messages(payloads, self.form, self.scale_dtype, table, out, at, scale, add)


class RowQuantizer(BlockQuantizer):
    """A quantizer defined on the rows of a matrix, where each row is a block."""

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
        flat, code_field = self._fields(out, x.numel())
        self._clear_padding(out, x.numel())
        numbers = flat.view(-1, self.numbers)
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        noise = kernels.uniform(x.numel(), key, x.device) if self.stochastic else None
        for (blocks, rows), (_, code_rows) in zip(self._rows(x), self._rows(codes), strict=True):
            row_noise = None if noise is None else noise[: rows.numel()].view_as(rows)
            noise = None if noise is None else noise[rows.numel() :]
            row_numbers, row_codes = self._quantize(rows, row_noise)
            numbers[blocks] = row_numbers
            code_rows.copy_(row_codes.view(torch.uint8))
        kernels.pack_codes(codes, self.code_bits, code_field)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        flat, code_field = self._fields(payload, out.numel())
        numbers = flat.view(-1, self.numbers).to(torch.float32)
        codes = for_device(out.device).unpack_codes(code_field, self.code_bits, out.numel())
        for (blocks, out_rows), (_, code_rows) in zip(self._rows(out), self._rows(codes), strict=True):
            self._dequantize_add(numbers[blocks], code_rows, out_rows, scale)
