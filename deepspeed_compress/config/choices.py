"""Names of what a user can choose from, shared by `auto`, the doctor, `plan cluster` and the pages."""

NOW = "now"
"""Name of what runs without a change."""
AS_NOW = "as now"
"""Text for training that does not change."""
TIMES, LOSS = "times as fast", "loss"
"""Gain and price of a choice."""
THE_SAME = "the same"
INSIDE_NODES = "sharding inside nodes"
ISLANDS = "islands"


def in_bits(bits: int | str) -> str:
    """Return the name of what runs now, in fewer bits."""
    return f"{THE_SAME}, {bits} bits"


def inside_nodes(bits: int) -> str:
    """Return the name of sharding inside nodes, with gradients of `bits` bits between them, or uncompressed for 0."""
    return INSIDE_NODES + (f", {bits} bits" if bits else "")


def islands(count: int, sync_every: int) -> str:
    """Return the name of training in islands."""
    return f"{count} {ISLANDS}, exchange every {sync_every} steps"
