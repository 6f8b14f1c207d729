"""Compressors: pure functions of a flat tensor, one small frozen dataclass per method."""

from deepspeed_compress.compression.compressors.base import DTYPES, Compressor, message_key, random_key
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
    "DTYPES",
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
