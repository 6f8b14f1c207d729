"""Seams of what tensor and pipeline parallelism send: sums inside layers, and messages between stages."""
