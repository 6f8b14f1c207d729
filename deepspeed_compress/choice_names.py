"""Names of what a user can choose from, shared by `auto`, the doctor, `plan cluster` and the pages."""

NOW = "now"
"""Name of what runs without a change."""
AS_NOW = "as now"
"""Price of what trains like that."""
TIMES, LOSS = "times as fast", "loss"
"""Gain and price of a choice."""
THE_SAME, INSIDE_NODES, ISLANDS = "the same", "sharding inside nodes", "islands"
"""Beginnings of the names of choices."""


def in_bits(bits: int) -> str:
    """Return the name of what runs now, with gradients of `bits` bits, and weights of as many or 8."""
    return f"{THE_SAME}, {bits} bits"


def inside_nodes(bits: int) -> str:
    """Return the name of sharding inside nodes, with gradients of `bits` bits between them; uncompressed ones for 0."""
    return INSIDE_NODES + (f", {bits} bits" if bits else "")


def islands(count: int, sync_every: int) -> str:
    """Return the name of training in `count` islands."""
    return f"{count} {ISLANDS}, exchange every {sync_every} steps"
