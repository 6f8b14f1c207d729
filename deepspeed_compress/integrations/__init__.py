"""Compression in unchanged training code: Hugging Face Trainer, Accelerate, TRL, and the launchers.

Importing this is light: transformers and accelerate are imported when a program does so, or when `hf` is imported.
"""

from deepspeed_compress.integrations.install import install

__all__ = ["install"]
