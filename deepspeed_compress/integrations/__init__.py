"""Compression of unmodified training code: Hugging Face Trainer, Accelerate, TRL, and the launchers.

Importing this package does not import transformers or accelerate; importing `integrations.hf` does.
"""

from deepspeed_compress.integrations.install import install

__all__ = ["install"]
