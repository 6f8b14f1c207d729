"""The compressors under test, and how to run one."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from deepspeed_compress.compressors import Blockwise, Cast, Compressor, TopK

SETTINGS: Mapping[str, tuple[Compressor, ...]] = MappingProxyType(
    {
        "none": (Cast(torch.float32),),
        "bf16": (Cast(torch.bfloat16),),
        "fp16": (Cast(torch.float16),),
        "blockwise": (
            Blockwise(),
            Blockwise(bits=8, block_size=32, stochastic=True),
            Blockwise(bits=4, block_size=32),
            Blockwise(bits=4, block_size=64, stochastic=True),
        ),
        "topk": (
            TopK(),
            TopK(1.0, 64),
            TopK(0.25, 64, Cast(torch.bfloat16)),
            TopK(0.25, 64, Cast(torch.float16)),
            TopK(0.1, 64, Blockwise(bits=4, block_size=32)),
            TopK(0.05, 128, Blockwise(bits=8, block_size=32, stochastic=True)),
        ),
    }
)
"""By the `method` of the configuration."""

CODECS = tuple(codec for codecs in SETTINGS.values() for codec in codecs)


def encode(codec: Compressor, x: Tensor, key: int = 1) -> Tensor:
    """The payload of `x`."""
    payload = torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8)
    codec.compress(x, payload, key)
    return payload


def decode(codec: Compressor, payload: Tensor, numel: int) -> Tensor:
    """The elements of `payload`."""
    out = torch.zeros(numel)
    codec.decompress_add(payload, out, 1.0)
    return out


def transmit(codec: Compressor, x: Tensor, key: int = 1) -> Tensor:
    """What a receiver makes of `x`."""
    return decode(codec, encode(codec, x, key), x.numel())
