"""A causal LM of transformers as megatron-core's GPTModel, and back. Read from megatron-core 0.16.1.

options  what GPTModel is told so that it computes the same
weights  the same weights in both, whole and cut by tensor and pipeline parallelism
cpu      what Megatron asks of CUDA, where there is none
"""

from deepspeed_compress.models.megatron.cpu import without_cuda
from deepspeed_compress.models.megatron.options import GPTOptions, gpt_options
from deepspeed_compress.models.megatron.weights import load_weights, save_pretrained

__all__ = ["GPTOptions", "gpt_options", "load_weights", "save_pretrained", "without_cuda"]
