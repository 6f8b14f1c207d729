"""Messages between islands and their parameter server: heads of the transport's frames, some with bodies.

An island sends `enter` (a new island), `resume` (from a checkpoint), and `leave`. Each of its ranks sends its part of
`fresh` (request the whole anchor), `seed` (weights that have not been trained yet) and `push`. The server answers
`welcome`, `left`, `resumed`, `newest`, `untrained`, `found` (there is no anchor), `exact`, `taken`, `dropped`,
`again` (it has lost calls in a crash) and `refused`. Calls are numbered by their island, so they may be sent twice.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from deepspeed_compress.config import Islands
from deepspeed_compress.transport.messages import Address, Fields, Messages, Text, validated

PARAMETER_SERVER = "parameter server"
"""Name of the service."""
LARGEST = 2**63 - 1
MOST_RANKS = 2**16
MOST_DIMENSIONS = 64


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > LARGEST:
        raise ValueError(f"a parameter has at most {LARGEST} elements")
    return shape


Number = Annotated[int, Field(ge=0, le=LARGEST)]
Slice = Annotated[tuple[Text, Number, Number], Field(strict=False)]
"""Name of a parameter, index of its first element, and number of elements."""
Layout = Annotated[tuple[Slice, ...], Field(strict=False)]
Shape = Annotated[tuple[Number, ...], Field(max_length=MOST_DIMENSIONS, strict=False), AfterValidator(_checked_shape)]


class Terms(Fields):
    """Settings that all islands of a run share.

    Attributes:
        ranks: Ranks of each island.
        max_staleness: Versions after which a push is dropped.
        settings: How pushes are compressed (`exchange`), and how the anchor moves (`outer`).
    """

    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    max_staleness: Annotated[int, Field(ge=1, le=LARGEST)]
    settings: Islands

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Terms":
        """Return the terms that an island has sent. Raises ValueError."""
        settings = {key: given.get(key) for key in ("exchange", "outer")}
        return validated(cls, {**given, "settings": settings}, "terms")


class Enter(Fields):
    """New island with `terms`."""

    terms: dict[str, Any]


class Saved(Fields):
    """State of an island in a checkpoint."""

    run: Address
    number: int
    call: int = 0
    version: int = 0


class Resume(Fields):
    """Island that has loaded a checkpoint."""

    saved: Saved


class FromIsland(Fields):
    """Message of island `number`. `token` proves that the sender is the process that entered or resumed it."""

    number: Number
    token: Address


class Part(FromIsland):
    """One rank's part of a call, without its body.

    Attributes:
        run: Run of the server to which the island belongs.
        place: Rank within the island.
        call: Number of the call, counted by the island from 1.
        step: Step of the island's learning-rate schedule.
        oldest: Oldest call that the rank can send again; 0 for none.
        is_again: True if the call was answered before a crash of the server, and its answer is not read.
    """

    run: Address
    place: Number
    call: Number
    step: Number = 0
    oldest: Number = 0
    is_again: bool = False

    @property
    def common(self) -> tuple[object, ...]:
        """Return the values that all ranks of the island must send alike."""
        return type(self).__name__, self.call


class Fresh(Part):
    """Request for the whole anchor."""


class Seed(Part):
    """Weights in fp32.

    Attributes:
        claim: Version of the weights in a checkpoint, 0 for new ones.
        layout: Slices of parameters, in the order of the body.
        shapes: Shapes of the parameters in `layout`.
    """

    claim: Annotated[int, Field(ge=0, le=LARGEST // 2)]
    layout: Layout
    shapes: dict[Text, Shape]

    @property
    def common(self) -> tuple[object, ...]:
        return *super().common, self.claim


class Push(Part):
    """Weight changes of `samples` samples since the last push; 0 if the island has diverged, and sends nothing."""

    samples: Number

    @property
    def common(self) -> tuple[object, ...]:
        return *super().common, self.samples


FROM_ISLANDS = Messages(
    {
        "enter": Enter,
        "resume": Resume,
        "leave": FromIsland,
        "status": Fields,
        "fresh": Fresh,
        "seed": Seed,
        "push": Push,
    }
)
