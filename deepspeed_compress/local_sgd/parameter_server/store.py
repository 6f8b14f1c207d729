"""State of a parameter server: the anchor, its momentum, and each island's starting version. No sockets or files.

The weight of a push is 1 / (1 + s), where s is the number of samples of other islands that the anchor has received
since the island started from it, for each sample of the push: n / (n + m) for n samples among m of others. The only
island has weight 1, and its anchor moves as in local SGD; of K equal ones each has 1 / K, as in a mean over all; a late
one has less. It is the weight of asynchronous federated learning (Xie et al., arXiv:1903.03934, section 5, polynomial
with a = 1) with staleness in samples. Momentum is that of delayed Nesterov (Liu et al., arXiv:2401.09135, algorithm 3
with c = 0): it is updated and applied when the received pushes make a whole mean, here when their weights add up to 1,
so that islands need not be counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.local_sgd.coordinator.reasons import different_terms
from deepspeed_compress.local_sgd.framed_messages import as_bytes, read_bytes
from deepspeed_compress.local_sgd.parameter_server.calls import Part, Sender, Terms, integer, read_part
from deepspeed_compress.local_sgd.parameter_server.places import (
    NAMES,
    Place,
    make_messages,
    make_place,
    read_place,
    refuse_unfit,
)
from deepspeed_compress.local_sgd.parameter_server.records import Island, Records
from deepspeed_compress.transport.connection import Buffer
from deepspeed_compress.transport.frames import Head

WHOLE = 1 - 1e-6
"""Sum of weights that makes a whole mean, up to rounding."""


@dataclass(frozen=True)
class Change:
    """Result of a call, which takes effect by `Store.commit`.

    Attributes:
        kind: Kind of the answer.
        records: Records after the change.
        places: Tensors after the change.
        reason: Reason for dropping a push.
        forgotten: Islands whose next answer must be the whole anchor.
    """

    kind: str
    records: Records
    places: Sequence[Place]
    reason: str = ""
    forgotten: Sequence[int] = field(default=())


class Store:
    """State of a parameter server. `prepare` checks and computes; `commit` cannot fail.

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

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as `__init__` takes them."""
        return tensors_of(self.places)

    def problem(self, terms: Any) -> str:
        """Return why an island with `terms` may not enter; "" if it may. Raises ValueError if they are not terms."""
        own, found = self.records.terms, refuse_unfit(lambda: Terms.read(terms))
        if own is None:
            refuse_unfit(lambda: make_messages(found.settings, (), {}).size(1))
            return ""
        return different_terms(terms, own)

    def check(self, part: Part) -> None:
        """Raise ValueError if the size or the place of `part` is wrong.

        The content is checked when all parts have arrived.
        """
        integer(part.place, "place", most=self.terms.ranks - 1)
        if part.kind != "push" or not part.samples:
            return
        if not self.places:
            raise ValueError("there is no anchor to push to")
        expected = refuse_unfit(lambda: self.places[part.place].messages.size(part.call))
        if part.size != expected:
            raise ValueError(f"the body of a push has {part.size} bytes (allowed: {expected})")

    def prepare(self, heads: Sequence[Head], bodies: Sequence[Buffer]) -> Change:
        """Return the change of a call: an island that enters, resumes or leaves, or a call of all of its ranks.

        Raises:
            ValueError: if it cannot be carried out. Nothing has changed then.
        """
        if not heads or len(heads) != len(bodies):
            raise ValueError(f"a call has {len(heads)} heads and {len(bodies)} bodies")
        simple = _SIMPLE.get(heads[0].get("kind"))
        if simple is not None:
            return refuse_unfit(lambda: simple(self, heads[0]))
        return refuse_unfit(lambda: self._prepare_call(heads, bodies))

    def commit(self, change: Change) -> None:
        """Apply `change`."""
        self.records, self.places = change.records, change.places
        if self._terms is None and self.records.terms is not None:
            self._terms = Terms.read(self.records.terms)
        for number in change.forgotten:
            self.forget(number)

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
        records, settings = self.records, self.terms.settings
        return tuple(
            read_place(settings, layout, records.shapes, _of_place(tensors, place))
            for place, layout in enumerate(records.layouts)
        )

    def _enter(self, head: Head) -> Change:
        records, problem = self.records, self.problem(head.get("terms"))
        if problem:
            raise ValueError(problem)
        removed = {integer(number, "forgotten") for number in head.get("forgotten", [])}
        islands = {number: one for number, one in records.islands.items() if number not in removed}
        islands[records.next_number] = Island.read({"token": head.get("token", "")})
        next_number, terms = records.next_number + 1, records.terms or head["terms"]
        after = replace(records, next_number=next_number, terms=terms, islands=islands)
        return Change("welcome", after, self.places, forgotten=tuple(removed))

    def _resume(self, head: Head) -> Change:
        sender = Sender.read(head)
        if not sender.token:
            raise ValueError(f"island {sender.number} is resumed without a token")
        island = replace(self._island(sender.number), token=sender.token, has_left=False)
        return Change("resumed", self._with_island(sender.number, island), self.places, forgotten=(sender.number,))

    def _leave(self, head: Head) -> Change:
        number = Sender.read(head).number
        island = replace(self._island(number), has_left=True)
        return Change("left", self._with_island(number, island), self.places, forgotten=(number,))

    def _island(self, number: int) -> Island:
        island = self.records.islands.get(number)
        if island is None:
            raise ValueError(f"island {number} is not known")
        return island

    def _with_island(self, number: int, island: Island) -> Records:
        """Return the records with `island` as the one that called last."""
        others = {other: one for other, one in self.records.islands.items() if other != number}
        return replace(self.records, islands={**others, number: island})

    def _prepare_call(self, heads: Sequence[Head], bodies: Sequence[Buffer]) -> Change:
        parts = [read_part(head, len(body)) for head, body in zip(heads, bodies, strict=True)]
        first = parts[0]
        if [one.place for one in parts] != list(range(self.terms.ranks)):
            raise ValueError(f"there are {len(parts)} parts (allowed: one for each of {self.terms.ranks} places)")
        for part in parts:
            self.check(part)
            if part.common != first.common:
                raise ValueError(f"ranks of an island make different calls: {first.common} and {part.common}")
        island = self._island(first.number)
        if first.call <= island.call:
            raise ValueError(f"call {first.call} of island {first.number} was carried out already")
        change = _CALLS[first.kind](self, island, parts, bodies)
        return self._complete(change, first)

    def _complete(self, change: Change, first: Part) -> Change:
        """Return `change` with the updates that every call makes to the records."""
        records = replace(change.records, step=max(change.records.step, first.step))
        weight = records.islands[first.number].weight
        token, others = records.islands[first.number].token, dict(records.islands)
        del others[first.number]
        island = Island(first.call, records.version, records.samples, weight, token)
        forgotten = () if change.kind == "taken" else (first.number,)
        return replace(change, records=replace(records, islands={**others, first.number: island}), forgotten=forgotten)

    def _fresh(self, island: Island, parts: Sequence[Part], bodies: Sequence[Buffer]) -> Change:
        return Change("exact" if self.records.version else "found", self.records, self.places)

    def _seed(self, island: Island, parts: Sequence[Part], bodies: Sequence[Buffer]) -> Change:
        """Take the weights of an island if there are none, or only older ones that have not been trained."""
        records, claim = self.records, parts[0].claim
        if records.version and (records.pushes or claim <= records.claimed):
            return Change("exact", records, self.places)
        shapes = _merged([part.shapes for part in parts])
        layouts, version = tuple(part.layout for part in parts), max(records.version + 1, claim)
        places = tuple(self._seed_place(*one, shapes) for one in zip(parts, bodies, strict=True))
        seeded = replace(records, layouts=layouts, shapes=shapes, version=version, claimed=claim, seeded=version)
        return Change("exact", seeded, places)

    def _seed_place(self, part: Part, body: Buffer, shapes: Mapping[str, tuple[int, ...]]) -> Place:
        anchor = read_bytes(body, torch.float32).clone()
        place = make_place(self.terms.settings, anchor, part.layout, shapes)
        if not place.is_finite:
            raise ValueError(f"the weights of rank {part.place} are not finite")
        if not place.messages.exact:
            # Answers are encoded by the same codec, and must not fail.
            place.messages.decode(place.messages.encode(torch.zeros_like(anchor), 1, part.number, remember=False), 1)
        return place

    def _push(self, island: Island, parts: Sequence[Part], bodies: Sequence[Buffer]) -> Change:
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
        after = replace(
            self._with_island(first.number, replace(island, weight=weight)),
            version=records.version + 1,
            pushes=records.pushes + 1,
            samples=records.samples + first.samples,
            pending=0.0 if is_whole else records.pending + weight,
        )
        return Change("taken", after, places)

    def _drop(self, island: Island, first: Part, reason: str) -> Change:
        after = self._with_island(first.number, replace(island, weight=0.0))
        return Change("dropped", after, self.places, reason)


_SIMPLE: Mapping[Any, Callable[[Store, Head], Change]] = {
    "enter": Store._enter,
    "resume": Store._resume,
    "leave": Store._leave,
}
_CALLS: Mapping[str, Callable[[Store, Island, Sequence[Part], Sequence[Buffer]], Change]] = {
    "fresh": Store._fresh,
    "seed": Store._seed,
    "push": Store._push,
}


def tensors_of(places: Sequence[Place]) -> dict[str, Tensor]:
    """Return the tensors of `places` by their names in files."""
    return {f"{name}/{number}": tensor for number, place in enumerate(places) for name, tensor in place.tensors.items()}


def _of_place(tensors: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    found = {name: tensors.get(f"{name}/{place}") for name in NAMES}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _merged(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all ranks. Raises ValueError if two ranks differ."""
    found: dict[str, tuple[int, ...]] = {}
    for own in shapes:
        for name, shape in own.items():
            if found.setdefault(name, shape) != shape:
                raise ValueError(f"ranks have shapes {found[name]} and {shape} of {name}")
    return found
