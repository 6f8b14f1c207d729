"""Compressors: pure functions of a flat tensor, one small frozen dataclass a method."""

from types import MappingProxyType

from deepspeed_compress.compression.compressors.base import Compressor, message_key, random_key
from deepspeed_compress.compression.compressors.block_topk import BlockTopK
from deepspeed_compress.compression.compressors.blockwise import Blockwise
from deepspeed_compress.compression.compressors.cast import Cast
from deepspeed_compress.compression.compressors.fp8 import FP8
from deepspeed_compress.compression.compressors.linear import Linear
from deepspeed_compress.compression.compressors.percentile import Percentile
from deepspeed_compress.compression.compressors.qsgd import QSGD
from deepspeed_compress.compression.compressors.randomk import RandomK
from deepspeed_compress.compression.compressors.sign import Sign
from deepspeed_compress.compression.compressors.topk import TopK

__all__ = [
    "COMPRESSORS",
    "FP8",
    "QSGD",
    "BlockTopK",
    "Blockwise",
    "Cast",
    "Compressor",
    "Linear",
    "Percentile",
    "RandomK",
    "Sign",
    "TopK",
    "message_key",
    "random_key",
]

COMPRESSORS: MappingProxyType[str, type[Compressor]] = MappingProxyType(
    {
        "none": Cast,
        "bf16": Cast,
        "fp16": Cast,
        "blockwise": Blockwise,
        "linear": Linear,
        "stochastic_linear": Linear,
        "percentile": Percentile,
        "qsgd": QSGD,
        "fp8_e4m3": FP8,
        "fp8_e5m2": FP8,
        "sign": Sign,
        "topk": TopK,
        "randomk": RandomK,
        "block_topk": BlockTopK,
        "dgc": TopK,
        "demo": TopK,
    }
)
"""Every `method` of the configuration that has messages of its own, and the class that makes them."""
