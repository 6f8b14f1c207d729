"""Seams of what tensor, pipeline and sequence parallelism send: sums, messages between stages, and all-to-alls."""
