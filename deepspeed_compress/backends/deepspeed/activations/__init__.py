"""Seams of what ranks with different parts of a model send: sums, messages between stages, tokens, and all-to-alls."""
