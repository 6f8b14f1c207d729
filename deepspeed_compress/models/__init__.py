"""Hugging Face causal language models in every layout of pipeline, tensor and data parallelism, and back.

- `gpt` builds a whole model, or a skeleton of it on the meta device.
- `build` builds this rank's part of a model from a skeleton. `model_families` says what can be divided; `pipeline`
  makes stages; `tensor` splits layers and vocabulary; and `sources` has the weights and fills them in.
- `export` writes a whole model again.
"""

from importlib.metadata import version

try:
    if int(version("transformers").partition(".")[0]) < 5:
        raise ImportError(f"transformers {version('transformers')} is installed")
    from deepspeed_compress.models.build import Layout, build_parallel, check_layout
    from deepspeed_compress.models.export import save_pretrained
    from deepspeed_compress.models.sources import build_model, read_model_config
    from deepspeed_compress.models.tensor import whole_logits
except ImportError as error:
    raise ImportError(
        f"{error}; deepspeed_compress.models needs transformers 5 and DeepSpeed 0.19.8, or newer"
    ) from error

__all__ = [
    "Layout",
    "build_model",
    "build_parallel",
    "check_layout",
    "read_model_config",
    "save_pretrained",
    "whole_logits",
]
