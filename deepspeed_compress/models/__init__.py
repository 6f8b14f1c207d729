"""Hugging Face causal language models, whole (`gpt`) or as pipeline stages (`gpt_pipeline`)."""

from deepspeed_compress.models.gpt import build_model, read_model_config
from deepspeed_compress.models.gpt_pipeline import build_pipeline

__all__ = ["build_model", "build_pipeline", "read_model_config"]
