"""The compressors under test, and helpers that run one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors import (
    FP8,
    QSGD,
    BlockTopK,
    Blockwise,
    Cast,
    Compressor,
    Linear,
    Percentile,
    RandomK,
    Sign,
    TopK,
)

_TOP_K = (
    TopK(),
    TopK(1.0, 64),
    TopK(0.25, 64, Cast(torch.bfloat16)),
    TopK(0.25, 64, Cast(torch.float16)),
    TopK(0.1, 64, Blockwise(bits=4, block_size=32)),
    TopK(0.05, 128, Blockwise(bits=8, block_size=32, stochastic=True)),
    TopK(0.25, 64, Blockwise(bits=2, block_size=32)),
    TopK(0.25, 64, Sign(32)),
    TopK(0.1, scope="tensor"),
    TopK(0.25, values=Cast(torch.bfloat16), scope="threshold"),
    TopK(0.25, 64, min_magnitude=1e-3),
)
SETTINGS: Mapping[str, tuple[Compressor, ...]] = {
    "none": (Cast(torch.float32),),
    "bf16": (Cast(torch.bfloat16),),
    "fp16": (Cast(torch.float16),),
    "blockwise": (
        Blockwise(),
        Blockwise(bits=8, block_size=32, stochastic=True),
        Blockwise(bits=4, block_size=32),
        Blockwise(bits=4, block_size=64, stochastic=True),
        Blockwise(bits=4, block_size=32, scale_dtype=torch.bfloat16),
        Blockwise(bits=8, block_size=32, scale_dtype=torch.float16),
        Blockwise(bits=2, block_size=32),
        Blockwise(bits=2, block_size=32, scale_dtype=torch.bfloat16),
        Blockwise(bits=2, block_size=32, stochastic=True),
        Blockwise(bits=3, block_size=32),
        Blockwise(bits=3, block_size=64, scale_dtype=torch.bfloat16),
        Blockwise(bits=3, block_size=32, stochastic=True),
    ),
    "linear": (Linear(), Linear(bits=4, block_size=32, scale_dtype=torch.bfloat16), Linear(bits=2, block_size=32)),
    "stochastic_linear": (Linear(8, 32, stochastic=True), Linear(2, 64, stochastic=True)),
    "percentile": (
        Percentile(),
        Percentile(4, 32, 90.0),
        Percentile(2, 32, 75.0),
        Percentile(4, 64, 95.0, stochastic=True),
    ),
    "qsgd": (QSGD(7, 32), QSGD(127), QSGD(15, 64)),
    "fp8_e4m3": (FP8("e4m3"), FP8("e4m3", 32)),
    "fp8_e5m2": (FP8("e5m2"), FP8("e5m2", 32)),
    "sign": (
        Sign(),
        Sign(32),
        Sign(64, scale_dtype=torch.float16),
        Sign(32, levels=3),
        Sign(64, 3, torch.bfloat16),
    ),
    "topk": _TOP_K,
    "randomk": (
        RandomK(0.25, 64),
        RandomK(0.5, 64, rescale=True),
        RandomK(0.1, 64, Blockwise(bits=8, block_size=32, stochastic=True)),
    ),
    "block_topk": (
        BlockTopK(0.25, 64, 8),
        BlockTopK(0.5, 64, 4, Blockwise(bits=4, block_size=32)),
        BlockTopK(1.0, 32, 1, Cast(torch.bfloat16)),
    ),
    "dgc": _TOP_K[:1],
    "demo": _TOP_K[4:5],
}
"""Compressors by the `method` of the configuration."""

CODECS = tuple(dict.fromkeys(codec for codecs in SETTINGS.values() for codec in codecs))


def noise(numel: int, seed: int = 0) -> Tensor:
    """Return reproducible normal numbers: fp32 [numel]."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def is_random(codec: Compressor) -> bool:
    """Return True if the result depends on the key."""
    inner = getattr(codec, "values", codec)
    return isinstance(codec, RandomK) or isinstance(inner, QSGD) or bool(getattr(inner, "stochastic", False))


def encode(codec: Compressor, x: Tensor, key: int = 1) -> Tensor:
    """Return the payload of `x`."""
    payload = torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8)
    codec.compress(x, payload, key)
    return payload


def decode(codec: Compressor, payload: Tensor, numel: int) -> Tensor:
    """Return the decoded `payload`."""
    out = torch.zeros(numel)
    codec.decompress_add(payload, out, 1.0)
    return out


def transmit(codec: Compressor, x: Tensor, key: int = 1) -> Tensor:
    """Return `x`, encoded and decoded."""
    return decode(codec, encode(codec, x, key), x.numel())
