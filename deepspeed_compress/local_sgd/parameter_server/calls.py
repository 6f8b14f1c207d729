"""Strict validation of calls: a call that passes here and in `Store.prepare` can be applied.

Numbers are exact integers below 2**63: `True`, `1.0` and `"1"` are not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from deepspeed_compress.config import Islands
from deepspeed_compress.transport.frames import Head
from deepspeed_compress.transport.messages import shown

T = TypeVar("T")
LARGEST = 2**63 - 1
MOST_RANKS = 2**16
MOST_DIMENSIONS = 64
MOST_CHARACTERS = 1000
"""Most characters of the name of a parameter, and of other texts."""


def integer(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Return `value`. Raises ValueError unless it is an exact integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)} (allowed: an integer from {least} to {most})")
    return value


def read_as(adapter: TypeAdapter[T], given: Any, what: str) -> T:
    """Return `given`, which is `what`, as the type of `adapter`. Raises ValueError for the first field that is wrong.

    The error of pydantic is not chained, since it shows all of a call, and thus its token.
    """
    try:
        return adapter.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        raise ValueError(f"{name} is missing in {what} (required)")
    raise ValueError(f"{name} is {shown(first['input'])} ({first['msg'].replace('Input should be ', 'allowed: ')})")


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    integer(math.prod(shape), "the number of elements")
    return shape


Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Text = Annotated[str, Field(strict=True, max_length=MOST_CHARACTERS)]
Slice = tuple[Text, Count, Count]
"""Name of a parameter, index of its first element, and number of elements."""
Shape = Annotated[tuple[Count, ...], Field(max_length=MOST_DIMENSIONS), AfterValidator(_checked_shape)]


@dataclass(frozen=True)
class Terms:
    """Settings that all islands of a run share.

    Attributes:
        ranks: Ranks of each island.
        max_staleness: Versions after which a push is dropped.
        settings: How pushes are compressed (`exchange`), and how the anchor moves (`outer`).
    """

    ranks: Annotated[int, Field(strict=True, ge=1, le=MOST_RANKS)]
    max_staleness: Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
    settings: Islands

    @classmethod
    def read(cls, given: Any) -> "Terms":
        """Return the terms that an island has sent. Raises ValueError."""
        if not isinstance(given, Mapping):
            raise ValueError(f"terms are {shown(given)} (allowed: an object)")
        settings = {key: given.get(key) for key in ("exchange", "outer")}
        return read_as(_TERMS, {**given, "settings": settings}, "terms")


@dataclass(frozen=True)
class Sender:
    """Island that sends a message, and proof that the sender is the process that entered or resumed it."""

    number: Count
    token: Text = ""

    @classmethod
    def read(cls, head: Head) -> "Sender":
        """Return the sender of the message with `head`. Raises ValueError."""
        return read_as(_SENDER, head, _name(head))


@dataclass(frozen=True)
class Part:
    """One rank's part of a call, without its body.

    Attributes:
        kind: `fresh`, `seed` or `push`.
        number: Number of the island.
        place: Rank within the island.
        call: Number of the call, counted by the island from 1.
        size: Bytes of the body: payload of a push, or weights of a seed in fp32.
        step: Step of the island's learning-rate schedule.
        token: Proof that the sender is the process that entered or resumed the island.
        oldest: Oldest call that the rank can send again; 0 for none.
        is_again: True if the call was answered before a crash of the server, and its answer is not read.
        samples: For a push: samples since the last one. 0 if the island has diverged, and sends nothing.
        claim: For a seed: version of the weights in a checkpoint, 0 for new ones.
        layout: For a seed: slices of parameters, in the order of the body.
        shapes: For a seed: shapes of the parameters in `layout`.
    """

    kind: Literal["fresh", "seed", "push"]
    number: Count
    place: Count
    call: Count
    size: Count
    step: Count = 0
    token: Text = ""
    oldest: Count = 0
    is_again: Annotated[bool, Field(strict=True)] = False
    samples: Count = 0
    claim: Annotated[int, Field(strict=True, ge=0, le=LARGEST // 2)] = 0
    layout: tuple[Slice, ...] = ()
    shapes: dict[Text, Shape] = field(default_factory=dict)

    @property
    def common(self) -> tuple[str, int, int, int, int]:
        """Return the values that all ranks of the island must send alike."""
        return self.kind, self.number, self.call, self.samples, self.claim


_TERMS, _SENDER, _PART = TypeAdapter(Terms), TypeAdapter(Sender), TypeAdapter(Part)
_FIELDS: Mapping[str, frozenset[str]] = {
    "fresh": frozenset(),
    "seed": frozenset({"claim", "layout", "shapes"}),
    "push": frozenset({"samples"}),
}
"""Fields that belong to one kind of call."""


def read_part(head: Head, size: int) -> Part:
    """Return one rank's part of a call, whose body has `size` bytes. Raises ValueError."""
    part = read_as(_PART, {**head, "size": size}, _name(head))
    given = frozenset[str]().union(*_FIELDS.values()) & head.keys()
    if given != _FIELDS[part.kind]:
        raise ValueError(f"a {part.kind} has {sorted(given)} (allowed: {sorted(_FIELDS[part.kind])})")
    check_slices(part.layout, part.shapes)
    expected = 4 * sum(numel for _, _, numel in part.layout)
    # Only the codec knows the size of a push with samples.
    if size != expected and not part.samples:
        raise ValueError(f"the body of a {part.kind} has {size} bytes (allowed: {expected})")
    return part


def _name(head: Head) -> str:
    return f"a call of kind {shown(head.get('kind'))}"


def check_slices(layout: Sequence[Slice], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if a slice of `layout` is not within its parameter."""
    for name, begin, numel in layout:
        if name not in shapes:
            raise ValueError(f"layout names {name}, whose shape is missing (allowed: parameters in shapes)")
        integer(begin + numel, f"the end of a slice of {name}", most=math.prod(shapes[name]))
