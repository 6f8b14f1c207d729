"""Compressors: pure functions of a flat tensor, one small frozen dataclass per method."""

from deepspeed_compress.compression.compressors.base import DTYPES, Compressor, message_key, random_key
from deepspeed_compress.compression.compressors.quantizers import FP8, QSGD, Blockwise, Cast, Linear, Percentile, Sign
from deepspeed_compress.compression.compressors.sparsifiers import BlockTopK, RandomK, TopK

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
