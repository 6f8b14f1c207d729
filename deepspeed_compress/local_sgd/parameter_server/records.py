"""State of a parameter server except tensors: plain data, replaced as a whole, and validated on reading."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from deepspeed_compress.local_sgd.parameter_server.calls import (
    Slice,
    Terms,
    check_slices,
    read_layout,
    read_shapes,
    shown,
    text,
)

T = TypeVar("T")


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

    call: int = 0
    version: int = 0
    samples: int = 0
    weight: float = 1.0
    token: str = ""
    has_left: bool = False

    @classmethod
    def read(cls, found: Any) -> "Island":
        """Return the island that a file holds. Raises ValueError."""
        island = _built(cls, found)
        for name in ("call", "version", "samples"):
            _natural(getattr(island, name), name)
        text(island.token, "token")
        if type(island.has_left) is not bool:
            raise ValueError(f"has_left is {shown(island.has_left)} (allowed: true, false)")
        _fraction(island.weight, "weight", 1.0)
        return island


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

    run: str
    terms: Mapping[str, Any] | None = None
    version: int = 0
    samples: int = 0
    pushes: int = 0
    seeded: int = 0
    claimed: int = 0
    pending: float = 0.0
    step: int = 0
    next_number: int = 0
    layouts: Sequence[Sequence[Slice]] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    islands: Mapping[int, Island] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Any) -> "Records":
        """Return the records from the result of `as_json`. Raises ValueError."""
        records = _built(cls, found)
        text(records.run, "run")
        for name in ("version", "samples", "pushes", "seeded", "claimed", "step", "next_number"):
            _natural(getattr(records, name), name)
        _fraction(records.pending, "pending", math.inf)
        if not isinstance(records.layouts, list | tuple) or not isinstance(records.islands, Mapping):
            raise ValueError(f"layouts are {shown(records.layouts)}, islands {shown(records.islands)}")
        layouts, shapes = tuple(read_layout(one) for one in records.layouts), read_shapes(records.shapes)
        for layout in layouts:
            check_slices(layout, shapes)
        islands = {int(number): Island.read(one) for number, one in records.islands.items()}
        if any(not 0 <= number < records.next_number for number in islands):
            raise ValueError(f"islands are {shown(list(islands))} (allowed: numbers below {records.next_number})")
        ahead = [one for one in islands.values() if one.version > records.version or one.samples > records.samples]
        if ahead:
            raise ValueError(f"an island is ahead of the anchor: {ahead[0]}")
        _check_places(records, len(layouts))
        return cls(**{**vars(records), "layouts": layouts, "shapes": shapes, "islands": islands})

    def as_json(self) -> dict[str, Any]:
        """Return the records as `read` takes them."""
        return asdict(self)


def _check_places(records: Records, places: int) -> None:
    if records.terms is None and (records.version or records.islands):
        raise ValueError("there are islands, and no terms")
    ranks = Terms.read(records.terms).ranks if records.version else 0
    if places != ranks:
        raise ValueError(f"there are layouts of {places} places (expected: {ranks})")


def _built(cls: type[T], found: Any) -> T:
    known = cls.__annotations__.keys()
    if not isinstance(found, Mapping) or not found.keys() <= known:
        raise ValueError(f"expected an object with {', '.join(sorted(known))}; got {shown(found)}")
    try:
        return cls(**found)
    except TypeError as error:
        raise ValueError(f"{error}") from error


def _natural(value: Any, name: str) -> None:
    """Raise ValueError unless `value` is an exact integer from 0. A sum over pushes may exceed 2**63."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {shown(value)} (allowed: an integer from 0)")


def _fraction(value: Any, name: str, most: float) -> None:
    if type(value) not in (int, float) or not 0 <= value <= most or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)} (allowed: a number from 0)")
