"""Exact, sparse weight updates from a trainer to rollout workers, which generate with the newest policy."""
