"""Bytes that DeepSpeed's own collectives send, a rank, by the ring algorithms of gloo and NCCL."""

__all__ = ["ring_all_gather", "ring_all_reduce", "ring_reduce_scatter"]


def ring_reduce_scatter(size: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends to reduce-scatter a buffer of `size` bytes."""
    return size * (ranks - 1) // ranks


ring_all_gather = ring_reduce_scatter
"""Bytes that each rank sends to gather a buffer of `size` bytes, of which it has its share."""


def ring_all_reduce(size: int, ranks: int) -> int:
    """A reduce-scatter followed by an all-gather."""
    return 2 * ring_reduce_scatter(size, ranks)
