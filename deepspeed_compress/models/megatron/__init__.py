"""Transformers causal LMs as megatron-core's GPTModel, and back. Read from megatron-core 0.16.1.

- `weights` makes the arguments with which GPTModel computes the same function, and converts weights, whole or divided
  by tensor and pipeline parallelism.
- `cpu` replaces Megatron's CUDA calls on machines without CUDA.
"""

from deepspeed_compress.models.megatron.cpu import without_cuda
from deepspeed_compress.models.megatron.weights import GPTOptions, gpt_options, load_weights, save_pretrained

__all__ = ["GPTOptions", "gpt_options", "load_weights", "save_pretrained", "without_cuda"]
