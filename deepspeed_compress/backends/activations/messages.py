"""Messages between pipeline stages: one tensor each, encoded as bytes. Both ends know its shape and type."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.backends.activations.sums import DTYPES
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.monitor import Meter


@dataclass(frozen=True)
class StageMessages:
    """Messages of one model, encoded by `codec`. What they save is counted as `bytes_pipeline_saved`."""

    codec: Codec
    meter: Meter

    @staticmethod
    def carries(tensor: Tensor) -> bool:
        """Return True if `tensor` can be compressed."""
        return tensor.dtype in DTYPES and tensor.numel() > 0

    def encode(self, tensor: Tensor) -> Tensor:
        """Return the message that carries `tensor`."""
        payload = self.payload(tensor)
        with self.meter.phase("compress", tensor.device):
            self.codec.encode(tensor.detach().reshape(-1).to(torch.float32), (), payload, key=0)
        self.meter.count("bytes_pipeline_saved", tensor.nbytes - payload.nbytes)
        return payload

    def decode(self, payload: Tensor, tensor: Tensor) -> None:
        """Overwrite `tensor` with what `payload` carries."""
        with self.meter.phase("decompress", tensor.device):
            values = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            self.codec.decode([payload], (), values, 1.0)
            tensor.detach().copy_(values.view_as(tensor))

    def payload(self, tensor: Tensor) -> Tensor:
        """Return a buffer for the message that carries `tensor`."""
        size = self.codec.compressor.payload_bytes(tensor.numel())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)
