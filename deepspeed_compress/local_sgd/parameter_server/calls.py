"""Strict validation of calls: a call that passes here and in `Store.prepare` can be applied and replayed.

Numbers are exact integers below 2**63: `True`, `1.0` and `"1"` are not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_compress.config import Islands
from deepspeed_compress.transport.connection import Buffer
from deepspeed_compress.transport.frames import Head

LARGEST = 2**63 - 1
MOST_RANKS = 2**16
MOST_DIMENSIONS = 64
MOST_CHARACTERS = 1000
"""Most characters of the name of a parameter, and of other texts."""
_SHOWN = 60

Slice = tuple[str, int, int]
"""Name of a parameter, index of its first element, and number of elements."""


def integer(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Return `value`. Raises ValueError unless it is an exact integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)} (allowed: an integer from {least} to {most})")
    return value


def text(value: Any, name: str) -> str:
    """Return `value`. Raises ValueError unless it is a string of at most `MOST_CHARACTERS`."""
    if type(value) is not str or len(value) > MOST_CHARACTERS:
        raise ValueError(f"{name} is {shown(value)} (allowed: a string of at most {MOST_CHARACTERS} characters)")
    return value


def shown(value: Any) -> str:
    """Return `value` as it appears in messages. Python refuses to print integers of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping | list | tuple):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    return repr(value)[:_SHOWN]


@dataclass(frozen=True)
class Terms:
    """Settings that all islands of a run share.

    Attributes:
        ranks: Ranks of each island.
        max_staleness: Versions after which a push is dropped.
        settings: How pushes are compressed (`exchange`), and how the anchor moves (`outer`).
    """

    ranks: int
    max_staleness: int
    settings: Islands

    @classmethod
    def read(cls, given: Any) -> "Terms":
        """Return the terms that an island has sent. Raises ValueError."""
        if not isinstance(given, Mapping):
            raise ValueError(f"terms are {shown(given)} (allowed: an object)")
        settings = Islands.model_validate({key: given.get(key) for key in ("exchange", "outer")})
        ranks = integer(given.get("ranks"), "ranks", 1, MOST_RANKS)
        return cls(ranks, integer(given.get("max_staleness"), "max_staleness", 1), settings)


@dataclass(frozen=True)
class Part:
    """One rank's part of a call.

    Attributes:
        kind: `fresh`, `seed` or `push`.
        number: Number of the island.
        place: Rank within the island.
        call: Number of the call, counted by the island from 1.
        step: Step of the island's learning-rate schedule.
        token: Proof that the sender is the process that entered or resumed the island.
        samples: For a push: samples since the last one. 0 if the island has diverged, and sends nothing.
        claim: For a seed: version of the weights in a checkpoint, 0 for new ones.
        layout: For a seed: slices of parameters, in the order of the body.
        shapes: For a seed: shapes of the parameters in `layout`.
        size: Bytes of the body.
        body: Payload of a push, or weights of a seed in fp32. Empty until it is read.
    """

    kind: str
    number: int
    place: int
    call: int
    step: int = 0
    token: str = ""
    samples: int = 0
    claim: int = 0
    layout: Sequence[Slice] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    size: int = 0
    body: Buffer = field(default=b"", repr=False)

    @property
    def common(self) -> tuple[str, int, int, int, int]:
        """Return the values that all ranks of the island must send alike."""
        return self.kind, self.number, self.call, self.samples, self.claim


def read_part(head: Head, body: Buffer) -> Part:
    """Return one rank's part of a call. Raises ValueError."""
    return replace(read_head(head, len(body)), body=body)


def read_head(head: Head, size: int) -> Part:
    """Return one rank's part of a call without its body, which has `size` bytes. Raises ValueError."""
    kind = head.get("kind")
    if type(kind) is not str or kind not in _BODIES:
        raise ValueError(f"kind is {shown(kind)} (allowed: {', '.join(_BODIES)})")
    number, place, call = (integer(head.get(name), name) for name in ("number", "place", "call"))
    step, token = integer(head.get("step", 0), "step"), text(head.get("token", ""), "token")
    samples = integer(head.get("samples"), "samples") if kind == "push" else 0
    seed = _read_seed(head) if kind == "seed" else {}
    part = Part(str(kind), number, place, call, step=step, token=token, samples=samples, size=size, **seed)
    expected = _BODIES[part.kind](part)
    if expected is not None and size != expected:
        raise ValueError(f"the body of a {kind} has {size} bytes (allowed: {expected})")
    return part


def _read_seed(head: Head) -> dict[str, Any]:
    shapes, layout = read_shapes(head.get("shapes")), read_layout(head.get("layout"))
    check_slices(layout, shapes)
    return {"claim": integer(head.get("claim"), "claim", most=LARGEST // 2), "layout": layout, "shapes": shapes}


def read_shapes(given: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes by the name of the parameter. Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f"shapes are {shown(given)} (allowed: an object)")
    return {text(name, "the name of a parameter"): _read_shape(shape, name) for name, shape in given.items()}


def _read_shape(given: Any, name: str) -> tuple[int, ...]:
    if not isinstance(given, list | tuple) or len(given) > MOST_DIMENSIONS:
        raise ValueError(f"the shape of {name} is {shown(given)} (allowed: a list of at most {MOST_DIMENSIONS})")
    shape = tuple(integer(size, f"the shape of {name}") for size in given)
    integer(math.prod(shape), f"the number of elements of {name}")
    return shape


def read_layout(given: Any) -> tuple[Slice, ...]:
    """Return slices of parameters, each sent as [name, begin, numel]. Raises ValueError."""
    if not isinstance(given, list | tuple) or any(not isinstance(one, list | tuple) or len(one) != 3 for one in given):
        raise ValueError(f"layout is {shown(given)} (allowed: a list of [name, begin, numel])")
    return tuple((text(name, "name"), integer(begin, "begin"), integer(numel, "numel")) for name, begin, numel in given)


def check_slices(layout: Sequence[Slice], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if a slice of `layout` is not within its parameter."""
    for name, begin, numel in layout:
        if name not in shapes:
            raise ValueError(f"layout names {name}, whose shape is missing (allowed: parameters in shapes)")
        integer(begin + numel, f"the end of a slice of {name}", most=math.prod(shapes[name]))


_BODIES: Mapping[str, Any] = {
    "fresh": lambda part: 0,
    "seed": lambda part: 4 * sum(numel for _, _, numel in part.layout),
    "push": lambda part: None if part.samples else 0,
}
"""Function that returns the body size in bytes of each kind; None if only the codec knows it."""
