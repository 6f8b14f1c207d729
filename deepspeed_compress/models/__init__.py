"""Hugging Face causal language models in every layout of pipeline, tensor and data parallelism, and back.

`gpt`: whole. `build`: divided, from `skeleton` (no memory yet) by way of `families` (what can be divided), `layers` and
`pipeline` (stages, cut by `balance`), `tensor` and `vocabulary` (split layers) and `filling` (weights from `sources`).
`export`: back. `universal`: what DeepSpeed's converter of checkpoints is told about the parts.
"""

from deepspeed_compress.models.build import Layout, build_parallel, check_layout
from deepspeed_compress.models.export import save_pretrained
from deepspeed_compress.models.gpt import build_model, read_model_config
from deepspeed_compress.models.vocabulary import whole_logits

__all__ = [
    "Layout",
    "build_model",
    "build_parallel",
    "check_layout",
    "read_model_config",
    "save_pretrained",
    "whole_logits",
]
