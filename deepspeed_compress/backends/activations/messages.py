"""Messages of activations: one tensor each, encoded as bytes, and their codecs. Both ends know its shape and type."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise
from deepspeed_compress.compression.transforms import Hadamard, Identity
from deepspeed_compress.monitor import Meter

BLOCK = 64
"""Elements that share a scale. Scales are bf16, so 8 bits take 8.25 bits per element, and 4 bits 4.25."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of tensors that are compressed. Others, such as fp64, are sent as they are."""


@dataclass(frozen=True)
class ActivationMessages:
    """Messages of one model, encoded by `codec`. What they save is counted as `saved`."""

    codec: Codec
    meter: Meter
    saved: str = "bytes_pipeline_saved"

    @staticmethod
    def carries(tensor: Tensor) -> bool:
        """Return True if `tensor` can be compressed."""
        return tensor.dtype in DTYPES and tensor.numel() > 0

    def encode(self, tensor: Tensor, receivers: int = 1) -> Tensor:
        """Return the message that carries `tensor` to a number of receivers."""
        payload = self.payload(tensor)
        with self.meter.phase("compress", tensor.device):
            self.codec.encode(tensor.detach().reshape(-1).to(torch.float32), (), payload, key=0)
        self.meter.count(self.saved, receivers * (tensor.nbytes - payload.nbytes))
        return payload

    def decode(self, payload: Tensor, tensor: Tensor) -> None:
        """Overwrite `tensor` with what `payload` carries."""
        self.decode_sum([payload], tensor)

    def decode_sum(self, payloads: Sequence[Tensor], tensor: Tensor) -> None:
        """Overwrite `tensor` with the sum of what `payloads` carry."""
        with self.meter.phase("decompress", tensor.device):
            values = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            self.codec.decode(payloads, (), values, 1.0)
            tensor.detach().copy_(values.view_as(tensor))

    def payload(self, tensor: Tensor) -> Tensor:
        """Return a buffer for the message that carries `tensor`."""
        size = self.codec.compressor.payload_bytes(tensor.numel())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)


def activation_codec(bits: int) -> Codec:
    """Return the codec of activations. With 4 bits, a rotation spreads their outliers over a block."""
    return Codec(_compressor(bits), Hadamard(BLOCK) if bits < 8 else Identity())


def gradient_codec(bits: int) -> Codec:
    """Return the codec of gradients of activations, which a rotation would not help."""
    return Codec(_compressor(bits))


def _compressor(bits: int) -> Blockwise:
    return Blockwise(bits, BLOCK, scale_dtype=torch.bfloat16)
