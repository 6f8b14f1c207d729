"""Limits of every service: sizes, deadlines, and numbers of connections."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of what one side accepts from the other, and for how long it waits.

    Attributes:
        head: Largest size in bytes of a head.
        body: Largest size in bytes of a body. `Connection.receive` takes another limit for one frame.
        patience: Seconds for a head that has begun, and for each chunk (256 KiB) of a body, in both directions.
    """

    head: int = 1 << 20
    body: int = 0
    patience: float = 30.0


@dataclass(frozen=True)
class Bounds:
    """Bounds on the connections of a server.

    Attributes:
        connections: Largest number of authenticated connections. A client above that gets ServerBusyError.
        pending: Largest number of unauthenticated connections.
        patience: Seconds for a connection to authenticate.
        silence: Seconds without a sign of the other host; the kernel ends a connection after three times as many.
    """

    connections: int = 1024
    pending: int = 128
    patience: float = 5.0
    silence: float = 10.0


DEFAULT_LIMITS = Limits()
"""Heads of 1 MiB, and no bodies."""
DEFAULT_BOUNDS = Bounds()
"""As many connections as a large job has hosts."""
MEMBERS = Limits(patience=10.0)
"""Limits of a coordinator or a supervisor."""
LARGE_HEAD = 1 << 24
"""Largest size in bytes of a message with the addresses of thousands of ranks, or with all parameters of a model."""
