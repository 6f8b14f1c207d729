"""Compressors: pure functions of a flat tensor, one small frozen dataclass a method."""

from types import MappingProxyType

from deepspeed_compress.compressors.base import Compressor, random_key
from deepspeed_compress.compressors.blockwise import Blockwise
from deepspeed_compress.compressors.cast import Cast
from deepspeed_compress.compressors.topk import TopK

__all__ = ["COMPRESSORS", "Blockwise", "Cast", "Compressor", "TopK", "random_key"]

COMPRESSORS: MappingProxyType[str, type[Compressor]] = MappingProxyType(
    {"none": Cast, "bf16": Cast, "fp16": Cast, "blockwise": Blockwise, "topk": TopK}
)
"""Every `method` of the configuration and the class that does it."""
