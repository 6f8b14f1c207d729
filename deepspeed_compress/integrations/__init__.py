"""Hugging Face Trainer, Accelerate, TRL, and the launchers: compression in training code that stays as it is.

Importing this is light: transformers and accelerate are loaded when a program has them, or when `hf` is imported.
"""

from deepspeed_compress.integrations.install import install

__all__ = ["install"]
