"""Seams of what ranks with different parts of a Megatron model send: sums inside layers, messages of stages, tokens."""
