"""State of a parameter server: the anchor, its momentum, and each island's starting version. No sockets or files.

The weight of a push is 1 / (1 + s), where s is the number of samples of other islands that the anchor has received
since the island started from it, for each sample of the push: n / (n + m) for n samples among m of others. The only
island has weight 1, and its anchor moves as in local SGD; of K equal ones each has 1 / K, as in a mean over all; a late
one has less. It is the weight of asynchronous federated learning (Xie et al., arXiv:1903.03934, section 5, polynomial
with a = 1) with staleness in samples. Momentum is that of delayed Nesterov (Liu et al., arXiv:2401.09135, algorithm 3
with c = 0): it is updated and applied when the received pushes make a whole mean, here when their weights add up to 1,
so that islands need not be counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_compress.local_sgd.coordinator.membership import different_terms
from deepspeed_compress.local_sgd.exchange import as_bytes, read_bytes
from deepspeed_compress.local_sgd.parameter_server.messages import Fresh, Layout, Part, Push, Seed, Shape, Terms
from deepspeed_compress.local_sgd.parameter_server.places import NAMES, Place, make_messages, read_place, refuse_unfit
from deepspeed_compress.transport.connection import Buffer, Head
from deepspeed_compress.transport.messages import Fields, Text, validated

WHOLE = 1 - 1e-6
"""Sum of weights that makes a whole mean, up to rounding."""
Natural = Annotated[int, Field(ge=0)]
"""Exact integer from 0. A sum over pushes may exceed 2**63."""


class Island(Fields):
    """Record of an island.

    Attributes:
        call: Number of its last call.
        version: Version of the anchor from which it started.
        samples: Samples that this anchor had received.
        weight: Weight of its last push.
        token: Proof of identity of the process that entered or resumed it last; empty once it has left.
    """

    call: Natural = 0
    version: Natural = 0
    samples: Natural = 0
    weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    token: Text = ""


class Records(Fields):
    """State except tensors: plain data, replaced as a whole.

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
    terms: dict[str, Any] | None = None
    version: Natural = 0
    samples: Natural = 0
    pushes: Natural = 0
    seeded: Natural = 0
    claimed: Natural = 0
    pending: Annotated[float, Field(ge=0)] = 0.0
    step: Natural = 0
    next_number: Natural = 0
    layouts: Annotated[tuple[Layout, ...], Field(strict=False)] = ()
    shapes: dict[Text, Shape] = Field(default_factory=dict)
    islands: dict[Annotated[int, Field(strict=False)], Island] = Field(default_factory=dict)

    @classmethod
    def read(cls, found: Any) -> "Records":
        """Return the records from the JSON of a file. Raises ValueError."""
        records = validated(cls, found, "the records")
        for layout in records.layouts:
            check_slices(layout, records.shapes)
        ranks = Terms.read(records.terms).ranks if records.version and records.terms else 0
        if len(records.layouts) != ranks:
            raise ValueError(f"there are layouts of {len(records.layouts)} places (expected: {ranks})")
        return records

    def having(self, **changes: Any) -> "Records":
        """Return the records with `changes`."""
        return self.model_copy(update=changes)

    def with_last(self, number: int, island: Island) -> "Records":
        """Return the records with `island` as the one that called last."""
        others = {other: one for other, one in self.islands.items() if other != number}
        return self.having(islands={**others, number: island})


@dataclass(frozen=True)
class Change:
    """Result of a call, which takes effect by `Store.commit`.

    Attributes:
        kind: Kind of the answer.
        records: Records after the change.
        places: Tensors after the change.
        reason: Reason for dropping a push.
    """

    kind: str
    records: Records
    places: Sequence[Place]
    reason: str = ""


class Store:
    """State of a parameter server. Methods that return a `Change` check and compute; `commit` cannot fail.

    The same calls in the same order give the same state, bit for bit. `answer` changes only the record of what
    islands hold. Not thread-safe.

    Raises:
        ValueError: if `tensors` do not fit `records`.
    """

    def __init__(self, records: Records, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.records = records
        self.places: Sequence[Place] = ()
        self._terms = None if records.terms is None else Terms.read(records.terms)
        self._anchors_held: dict[int, dict[int, Tensor]] = {}
        if records.version:
            self.places = refuse_unfit(lambda: self._read_places(tensors or {}))

    @property
    def terms(self) -> Terms:
        """Return the settings that islands share. Raises ValueError before the first island has entered."""
        if self._terms is None:
            raise ValueError("no island has entered yet")
        return self._terms

    def enter(self, terms: dict[str, Any], token: str, forgotten: Sequence[int]) -> Change:
        """Return the change of a new island with `terms`, in place of those that are `forgotten`.

        Raises:
            ValueError: if it may not enter.
        """
        records, found = self.records, refuse_unfit(lambda: Terms.read(terms))
        if records.terms is None:
            refuse_unfit(lambda: make_messages(found.settings, (), {}).size(1))
        problem = different_terms(terms, records.terms or terms)
        if problem:
            raise ValueError(problem)
        islands = {number: island for number, island in records.islands.items() if number not in forgotten}
        islands[records.next_number] = Island(token=token)
        after = records.having(next_number=records.next_number + 1, terms=records.terms or terms, islands=islands)
        return Change("welcome", after, self.places)

    def give_token(self, number: int, token: str) -> Change:
        """Return the change of an island that is resumed by another process, or leaves with an empty `token`."""
        island = self.records.islands[number].model_copy(update={"token": token})
        return Change("resumed" if token else "left", self.records.with_last(number, island), self.places)

    def check(self, part: Part, size: int) -> None:
        """Raise ValueError if the place of `part`, or the `size` of its body, is wrong."""
        if part.place >= self.terms.ranks:
            raise ValueError(f"place is {part.place} (allowed: below {self.terms.ranks})")
        expected = refuse_unfit(lambda: self._size(part))
        if size != expected:
            raise ValueError(f"the body of a {type(part).__name__.lower()} has {size} bytes (allowed: {expected})")

    def call(self, parts: Sequence[Part], bodies: Sequence[Buffer]) -> Change:
        """Return the change of a call of all ranks of an island, whose parts `check` has accepted, by place.

        Raises:
            ValueError: if it cannot be carried out. Nothing has changed then.
        """
        first, records = parts[0], self.records
        island = records.islands[first.number]
        change = refuse_unfit(lambda: _CALLS[type(first)](self, island, parts, bodies))
        records = change.records.having(step=max(records.step, first.step))
        called = {"call": first.call, "version": records.version, "samples": records.samples}
        island = records.islands[first.number].model_copy(update=called)
        return Change(change.kind, records.with_last(first.number, island), change.places, change.reason)

    def commit(self, change: Change) -> None:
        """Apply `change`."""
        self.records, self.places = change.records, change.places
        if self._terms is None and self.records.terms is not None:
            self._terms = Terms.read(self.records.terms)

    def answer(self, number: int, place: int, kind: str, call: int, reason: str = "") -> tuple[Head, Buffer]:
        """Return the answer to the rank at `place` of island `number`.

        It is the whole anchor, or its difference from what the island holds, which both sides then update alike.
        """
        records = self.records
        about = {"version": records.version, "step": records.step, "weight": records.islands[number].weight}
        head = {"kind": kind, **about, **({"reason": reason} if reason else {})}
        if kind == "found":
            return head, b""
        one, held = self.places[place], self._anchors_held.setdefault(number, {})
        if kind == "taken" and place in held and not one.messages.exact:
            payload = one.messages.encode(one.anchor - held[place], call, number, remember=False)
            reached = held[place] + one.messages.decode(payload, call)
            # A difference may exceed fp32 even if the anchor does not.
            if bool(torch.isfinite(reached).all()):
                held[place] = reached
                return head, as_bytes(payload)
        if not one.messages.exact:
            held[place] = one.anchor
        return {**head, "exact": True}, as_bytes(one.anchor)

    def repeated(self, number: int, place: int) -> tuple[Head, Buffer]:
        """Return the answer to the last call of an island once more."""
        self.forget(number)
        island = self.records.islands[number]
        kind = "found" if not self.records.version else "taken" if island.weight else "dropped"
        return self.answer(number, place, kind, island.call)

    def forget(self, number: int) -> None:
        """Forget what island `number` holds: its next answer is the whole anchor."""
        self._anchors_held.pop(number, None)

    def _read_places(self, tensors: Mapping[str, Tensor]) -> tuple[Place, ...]:
        records, settings, found = self.records, self.terms.settings, []
        for place, layout in enumerate(records.layouts):
            own = {name: tensors[key] for name in NAMES if (key := f"{name}/{place}") in tensors}
            found.append(read_place(settings, layout, records.shapes, own))
        return tuple(found)

    def _size(self, part: Part) -> int:
        """Return the size in bytes of the body of `part`."""
        if isinstance(part, Seed):
            check_slices(part.layout, part.shapes)
            return 4 * sum(numel for _, _, numel in part.layout)
        if not isinstance(part, Push) or not part.samples:
            return 0
        if not self.places:
            raise ValueError("there is no anchor to push to")
        return self.places[part.place].messages.size(part.call)

    def _fresh(self, island: Island, parts: Sequence[Fresh], bodies: Sequence[Buffer]) -> Change:
        return Change("exact" if self.records.version else "found", self.records, self.places)

    def _seed(self, island: Island, parts: Sequence[Seed], bodies: Sequence[Buffer]) -> Change:
        """Take the weights of an island if there are none, or only older ones that have not been trained."""
        records, claim = self.records, parts[0].claim
        if records.version and (records.pushes or claim <= records.claimed):
            return Change("exact", records, self.places)
        shapes = _merged([part.shapes for part in parts])
        layouts, version = tuple(part.layout for part in parts), max(records.version + 1, claim)
        places = tuple(self._seed_place(*one, shapes) for one in zip(parts, bodies, strict=True))
        seeded = records.having(layouts=layouts, shapes=shapes, version=version, claimed=claim, seeded=version)
        return Change("exact", seeded, places)

    def _seed_place(self, part: Seed, body: Buffer, shapes: Mapping[str, tuple[int, ...]]) -> Place:
        """Return a place with the weights in `body` as its anchor, and zero momentum."""
        anchor = read_bytes(body, torch.float32).clone()
        settings = self.terms.settings
        momentum = torch.zeros_like(anchor) if settings.outer.optimizer == "nesterov" else anchor.new_zeros(0)
        place = Place(anchor, momentum, momentum.clone(), make_messages(settings, part.layout, shapes))
        if not place.is_finite:
            raise ValueError(f"the weights of rank {part.place} are not finite")
        if not place.messages.exact:
            # Answers are encoded by the same codec, and must not fail.
            place.messages.decode(place.messages.encode(torch.zeros_like(anchor), 1, part.number, remember=False), 1)
        return place

    def _push(self, island: Island, parts: Sequence[Push], bodies: Sequence[Buffer]) -> Change:
        records, first = self.records, parts[0]
        late = island.version < records.seeded or records.version - island.version > self.terms.max_staleness
        if not first.samples or late:
            return self._drop(island, first, "it is too old" if late else "the island has diverged")
        updates = [
            place.messages.decode(read_bytes(body, torch.uint8), first.call)
            for place, body in zip(self.places, bodies, strict=True)
        ]
        if not all(bool(torch.isfinite(one).all()) for one in updates):
            return self._drop(island, first, "the update of the island is not finite")
        weight = first.samples / (first.samples + records.samples - island.samples)
        is_whole, outer = records.pending + weight >= WHOLE, self.terms.settings.outer
        places = tuple(
            place.after(update, weight, outer, is_whole) for place, update in zip(self.places, updates, strict=True)
        )
        if not all(place.is_finite for place in places):
            return self._drop(island, first, "the anchor would become non-finite")
        after = records.with_last(first.number, island.model_copy(update={"weight": weight})).having(
            version=records.version + 1,
            pushes=records.pushes + 1,
            samples=records.samples + first.samples,
            pending=0.0 if is_whole else records.pending + weight,
        )
        return Change("taken", after, places)

    def _drop(self, island: Island, first: Part, reason: str) -> Change:
        after = self.records.with_last(first.number, island.model_copy(update={"weight": 0.0}))
        return Change("dropped", after, self.places, reason)


_CALLS: Mapping[type[Part], Callable[[Store, Island, Sequence[Any], Sequence[Buffer]], Change]] = {
    Fresh: Store._fresh,
    Seed: Store._seed,
    Push: Store._push,
}


def tensors_of(places: Sequence[Place]) -> dict[str, Tensor]:
    """Return the tensors of `places` by their names in files."""
    return {f"{name}/{number}": tensor for number, place in enumerate(places) for name, tensor in place.tensors.items()}


def check_slices(layout: Layout, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if a slice of `layout` is not within its parameter."""
    for name, begin, numel in layout:
        if name not in shapes:
            raise ValueError(f"layout names {name}, whose shape is missing (allowed: parameters in shapes)")
        if begin + numel > math.prod(shapes[name]):
            raise ValueError(f"a slice of {name} ends at {begin + numel} (allowed: up to {math.prod(shapes[name])})")


def _merged(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all ranks. Raises ValueError if two ranks differ."""
    found: dict[str, tuple[int, ...]] = {}
    for own in shapes:
        for name, shape in own.items():
            if found.setdefault(name, shape) != shape:
                raise ValueError(f"ranks have shapes {found[name]} and {shape} of {name}")
    return found
