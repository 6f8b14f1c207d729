"""Decisions between steps: what is in force now. The same on every rank, because it depends on the step alone."""

from deepspeed_compress.policy.warmup import DenseWarmUp

__all__ = ["DenseWarmUp"]
