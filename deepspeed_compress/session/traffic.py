"""Bytes per rank that DeepSpeed's own collectives send with the ring algorithms of gloo and NCCL."""


def ring_reduce_scatter(size: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` sends to reduce-scatter a buffer of `size` bytes."""
    return size * (ranks - 1) // ranks


ring_all_gather = ring_reduce_scatter
"""Return the bytes that each rank sends to all-gather a buffer of `size` bytes, of which it has its share."""


def ring_all_reduce(size: int, ranks: int) -> int:
    """Return the bytes of a reduce-scatter followed by an all-gather."""
    return 2 * ring_reduce_scatter(size, ranks)
