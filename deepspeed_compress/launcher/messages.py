"""Messages between agents and their supervisor. The module `supervisor` explains each kind."""

import signal
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from deepspeed_compress.transport.messages import Address, Count, Fields, Messages, Name, Seconds, Text

SUPERVISOR = "supervisor"
"""Name of the service that the supervisor runs."""
Message = Mapping[str, Any]
_RANKS = 1 << 20


Port = Annotated[int, Field(ge=1, le=65535)]
Rank = Annotated[int, Field(ge=0, le=_RANKS)]


class Join(Fields):
    """Connection of an agent."""

    name: Name
    job: Name
    address: Annotated[Address, Field(min_length=1)]
    port: Port


class OfStart(Fields):
    """Fields about the start of that number."""

    start: Count


class Beat(OfStart):
    """State of the ranks of a host."""

    silent: Seconds | None = None
    steps: Count


class Failed(OfStart):
    """End of a rank with an error."""

    rank: Rank
    how: Text
    permanent: bool
    steps: Count


class Stopped(OfStart):
    """End of all ranks that a host had to stop."""

    steps: Count
    port: Port
    error: Text | None = None
    error_time: Seconds | None = None


def _ending(number: int) -> int:
    if number not in (signal.SIGINT, signal.SIGTERM):
        raise ValueError("the signal is neither SIGINT nor SIGTERM")
    return number


class Signal(Fields):
    """Signal of a user, SIGINT or SIGTERM, which ends the job."""

    # A Literal would take 2.0, also in strict mode.
    number: Annotated[int, AfterValidator(_ending)]


FROM_AGENTS = Messages(
    {"join": Join, "beat": Beat, "failed": Failed, "done": OfStart, "stopped": Stopped, "end": Signal}
)


class Start(OfStart):
    """Start of the ranks of a host."""

    restart: Count
    world: Rank
    hosts: Annotated[list[Annotated[Address, Field(min_length=1)]], Field(max_length=_RANKS)]
    port: Port
    resume: bool
    node: Rank


class Pass(OfStart, Signal):
    """Signal to forward to the ranks."""


class Over(Fields):
    """End of the job."""

    code: Annotated[int, Field(ge=0, le=255)]
    why: Annotated[str, Field(max_length=1 << 16)]


class Refused(Fields):
    """Reason for which an agent may not join."""

    why: Text


FROM_SUPERVISOR = Messages(
    {
        "start": Start,
        "stop": OfStart,
        "pass": Pass,
        "over": Over,
        "refused": Refused,
        "beat": Fields,
    }
)
