"""State of a parameter server except tensors: plain data, replaced as a whole, and validated on reading."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from deepspeed_compress.local_sgd.parameter_server.calls import Shape, Slice, Terms, Text, check_slices, read_as
from deepspeed_compress.transport.messages import shown

Natural = Annotated[int, Field(strict=True, ge=0)]
"""Exact integer from 0. A sum over pushes may exceed 2**63."""
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_ONLY_THESE = ConfigDict(extra="forbid")


@with_config(_ONLY_THESE)
@dataclass(frozen=True)
class Island:
    """Record of an island.

    Attributes:
        call: Number of its last call.
        version: Version of the anchor from which it started.
        samples: Samples that this anchor had received.
        weight: Weight of its last push.
        token: Proof of identity of the process that entered or resumed it last.
        has_left: True if it has left.
    """

    call: Natural = 0
    version: Natural = 0
    samples: Natural = 0
    weight: Annotated[Number, Field(le=1)] = 1.0
    token: Text = ""
    has_left: Annotated[bool, Field(strict=True)] = False

    @classmethod
    def read(cls, found: Any) -> "Island":
        """Return the island with the fields `found`. Raises ValueError."""
        return read_as(_ISLAND, found, "an island")


@with_config(_ONLY_THESE)
@dataclass(frozen=True)
class Records:
    """All records except tensors.

    Attributes:
        run: Name of this run.
        terms: Settings of the first island, with which all others must agree. None before it entered.
        version: Version of the anchor; 0 if there is none.
        samples: Samples that the anchor has received.
        pushes: Number of accepted pushes.
        seeded: Version of the anchor when it was seeded.
        claimed: Version that a checkpoint gave to that seed; 0 for new weights.
        pending: Sum of the weights of pushes since momentum was last updated.
        step: Largest step of any island's learning-rate schedule.
        next_number: Number of the next island.
        layouts: Slices of parameters, by place.
        shapes: Shapes of the parameters.
        islands: Islands by number; the one that called last is last.
    """

    run: Text
    terms: Mapping[str, Any] | None = None
    version: Natural = 0
    samples: Natural = 0
    pushes: Natural = 0
    seeded: Natural = 0
    claimed: Natural = 0
    pending: Number = 0.0
    step: Natural = 0
    next_number: Natural = 0
    layouts: tuple[tuple[Slice, ...], ...] = ()
    shapes: dict[Text, Shape] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Any) -> "Records":
        """Return the records from the result of `as_json`. Raises ValueError."""
        records = read_as(_RECORDS, found, "the records")
        for layout in records.layouts:
            check_slices(layout, records.shapes)
        islands = records.islands
        if any(not 0 <= number < records.next_number for number in islands):
            raise ValueError(f"islands are {shown(list(islands))} (allowed: numbers below {records.next_number})")
        ahead = [one for one in islands.values() if one.version > records.version or one.samples > records.samples]
        if ahead:
            raise ValueError(f"an island is ahead of the anchor: {ahead[0]}")
        records._check_places()
        return records

    def as_json(self) -> dict[str, Any]:
        """Return the records as `read` takes them."""
        return asdict(self)

    def _check_places(self) -> None:
        if self.terms is None and (self.version or self.islands):
            raise ValueError("there are islands, and no terms")
        ranks = Terms.read(self.terms).ranks if self.version else 0
        if len(self.layouts) != ranks:
            raise ValueError(f"there are layouts of {len(self.layouts)} places (expected: {ranks})")


_ISLAND, _RECORDS = TypeAdapter(Island), TypeAdapter(Records)
