"""What a parameter server has: the anchor, its momentum, and from where each island set out. No sockets, no files.

A push counts by 1 / (1 + s), where s is how many samples of others the anchor has got, for each one of the push, since
its island set out: n / (n + m) for n samples among m of others. An island alone counts fully, and its anchor moves as
by local SGD; of K equal ones each counts by 1 / K, as in a mean over all; whoever is late counts less. It is the weight
of asynchronous federated learning (Xie et al., arXiv:1903.03934, section 5, polynomial with a = 1) with staleness in
samples. Momentum is that of delayed Nesterov (Liu et al., arXiv:2401.09135, algorithm 3 with c = 0): it is renewed and
applied when what has come is a whole mean, here when weights add up to 1, so nobody has to be counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.communication.elastic import group_of_one
from deepspeed_compress.communication.parcels import Parcels, as_bytes, read_bytes
from deepspeed_compress.communication.reducer import Run, StepClock
from deepspeed_compress.communication.reduction import Groups, Parameters, Reductions, Site
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import Islands, Outer
from deepspeed_compress.monitor import Meter
from deepspeed_compress.services.parameter_server.frames import Buffer, Head

__all__ = ["Island", "Place", "Records", "Store", "as_json"]

WHOLE = 1 - 1e-6
"""Weights that make up a mean, to rounding."""
KEPT = 1000
"""Islands that are remembered: one that comes back after more of them is a new one."""


@dataclass
class Island:
    """`call`: number of its last one. `version`: of the anchor that it set out from, which had got so many `samples`.
    `weight`: of its last push."""

    call: int = 0
    version: int = 0
    samples: int = 0
    weight: float = 1.0


@dataclass
class Records:
    """What there is to know beside tensors. `terms`: what islands must have alike. `samples`: that the anchor has got.
    `pushes`: that made it. `seeded`: its version when it was seeded, from what a checkpoint called version `claimed`.
    `pending`: weights since momentum was renewed. `step`: of the schedule of whoever is furthest. `layouts`: of places,
    lists of parameter, begin and numel. `shapes`: of parameters."""

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
    layouts: list[list[list[Any]]] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Records":
        """The inverse of `asdict`, after JSON. TypeError where it is none."""
        islands = {int(number): Island(**one) for number, one in found["islands"].items()}
        return cls(**{**found, "islands": islands})


@dataclass(frozen=True)
class Place:
    """What the ranks of equal place have: flat fp32 on the host, `segments` of them in order."""

    anchor: Tensor
    momentum: Tensor
    waiting: Tensor
    parcels: Parcels

    def move(self, moved: Tensor, weight: float, outer: Outer) -> None:
        """Take what an island has `moved` (overwritten)."""
        moved.mul_(weight)
        self.anchor.add_(moved, alpha=outer.lr)
        if outer.optimizer == "nesterov":
            self.waiting.add_(moved)

    def renew_momentum(self, outer: Outer) -> None:
        """What has come is a whole mean."""
        if outer.optimizer == "nesterov":
            self.momentum.mul_(outer.momentum).add_(self.waiting)
            self.anchor.add_(self.momentum, alpha=outer.lr * outer.momentum)
            self.waiting.zero_()


class Store:
    """`enter` and `apply` change it, alike whenever they are repeated in the same order; `answer` only what islands are
    known to hold. Not for several threads at once."""

    def __init__(self, records: Records, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.records = records
        self.places: list[Place] = []
        self._held: dict[int, dict[int, Tensor]] = {}
        self._settings: Islands | None = None
        if records.version and tensors is not None:
            self._settle([tensors[f"anchor/{place}"].clone() for place in range(len(records.layouts))])
            for place, one in enumerate(self.places):
                one.momentum.copy_(tensors[f"momentum/{place}"])
                one.waiting.copy_(tensors[f"waiting/{place}"])

    @property
    def settings(self) -> Islands:
        """Of the islands. Only where there are any."""
        if self._settings is None:
            assert self.records.terms is not None, "islands say it when they enter"
            self._settings = _settings(self.records.terms)
        return self._settings

    @property
    def _ranks(self) -> int:
        return int((self.records.terms or {})["ranks"])

    def tensors(self) -> dict[str, Tensor]:
        """What `__init__` takes."""
        names = ("anchor", "momentum", "waiting")
        return {f"{name}/{place}": getattr(one, name) for place, one in enumerate(self.places) for name in names}

    def problem(self, terms: Mapping[str, Any]) -> str:
        """Why an island of `terms` may not enter; "" where it may. ValueError, KeyError or TypeError where they are
        none."""
        own = self.records.terms
        if own is None:
            _settings(terms)
        texts = [
            f"{key} is {value!r}, that of the others {own.get(key)!r}"
            for key, value in terms.items()
            if own is not None and own.get(key) != value
        ]
        return "; ".join(texts)

    def enter(self, terms: Mapping[str, Any]) -> int:
        """The number of a new island."""
        records = self.records
        if records.terms is None:
            records.terms = dict(terms)
        number, records.next_number = records.next_number, records.next_number + 1
        records.islands[number] = Island()
        for old in list(records.islands)[: max(0, len(records.islands) - KEPT)]:
            del records.islands[old]
        return number

    def check(self, head: Head, body: Buffer) -> None:
        """ValueError, KeyError or TypeError where this is no part of a call: what is carried out must not fail."""
        whole = [head["number"], head["place"], head["call"], head.get("step", 0), head.get("samples", 0)]
        right = all(isinstance(one, int) and one >= 0 for one in whole) and head["place"] < self._ranks
        if not right or not {"fresh": _is_fresh, "seed": _is_seed, "push": self._is_push}[head["kind"]](head, body):
            raise ValueError(f"no part of a call: {head}")

    def _is_push(self, head: Head, body: Buffer) -> bool:
        places, samples = self.places, head["samples"]
        return bool(places) and (not samples or len(body) == places[head["place"]].parcels.size(head["call"]))

    def apply(self, heads: Sequence[Head], bodies: Sequence[Buffer]) -> str:
        """Carry out a call of an island, whose ranks have said `heads` and `bodies`; the kind of the answer."""
        head, islands = heads[0], self.records.islands
        # The last one is that of the last call: who lives is remembered.
        island = islands[head["number"]] = islands.pop(head["number"])
        kind = {"fresh": self._fresh, "seed": self._seed, "push": self._push}[head["kind"]](island, heads, bodies)
        self.records.step = max(self.records.step, int(head.get("step", 0)))
        island.call, island.version, island.samples = head["call"], self.records.version, self.records.samples
        return kind

    def answer(self, number: int, place: int, kind: str, call: int) -> tuple[Head, Buffer]:
        """What the rank at `place` of island `number` hears: the anchor as it is, or how it differs from what the
        island holds, which is then what both say it is."""
        records = self.records
        weight = records.islands[number].weight
        head = {"kind": kind, "version": records.version, "step": records.step, "weight": weight}
        if kind == "found":
            return head, b""
        one, held = self.places[place], self._held.setdefault(number, {})
        if kind == "taken" and place in held and not one.parcels.exact:
            payload = one.parcels.encode(one.anchor - held[place], call, number, remember=False)
            held[place].add_(one.parcels.decode(payload, call))
            return head, as_bytes(payload)
        if not one.parcels.exact:
            held[place] = one.anchor.clone()
        return {**head, "exact": True}, bytes(as_bytes(one.anchor))

    def repeated(self, number: int, place: int) -> tuple[Head, Buffer]:
        """The answer to the last call of an island, which was carried out before the server ended."""
        self.forget(number)
        island = self.records.islands[number]
        kind = "found" if not self.records.version else "taken" if island.weight else "dropped"
        return self.answer(number, place, kind, island.call)

    def forget(self, number: int) -> None:
        """What island `number` holds: the next answer says all."""
        self._held.pop(number, None)

    def _fresh(self, island: Island, heads: Sequence[Head], bodies: Sequence[Buffer]) -> str:
        self.forget(heads[0]["number"])
        return "exact" if self.records.version else "found"

    def _seed(self, island: Island, heads: Sequence[Head], bodies: Sequence[Buffer]) -> str:
        """Weights that somebody begins with: taken where there are none, or only older ones that nobody has trained."""
        self.forget(heads[0]["number"])
        records, claim = self.records, int(heads[0]["claim"])
        if records.version and (records.pushes or claim <= records.claimed):
            return "exact"
        records.layouts = [[list(piece) for piece in head["layout"]] for head in heads]
        records.shapes = {name: list(shape) for head in heads for name, shape in head["shapes"].items()}
        records.version, records.claimed = max(records.version + 1, claim), claim
        records.seeded = records.version
        self._settle([read_bytes(body, torch.float32).clone() for body in bodies])
        return "exact"

    def _push(self, island: Island, heads: Sequence[Head], bodies: Sequence[Buffer]) -> str:
        records, head = self.records, heads[0]
        samples, stale = int(head["samples"]), records.version - island.version
        others = records.samples - island.samples
        late = island.version < records.seeded or stale > int((records.terms or {})["max_staleness"])
        moved = self._decoded(heads[0]["call"], bodies) if samples and not late else []
        if not moved:
            island.weight = 0.0
            self.forget(head["number"])
            return "dropped"
        island.weight, outer = samples / (samples + others), self.settings.outer
        for one, by in zip(self.places, moved, strict=True):
            one.move(by, island.weight, outer)
        records.pending += island.weight
        if records.pending >= WHOLE:
            records.pending = 0.0
            for one in self.places:
                one.renew_momentum(outer)
        records.version, records.pushes, records.samples = (
            records.version + 1,
            records.pushes + 1,
            records.samples + samples,
        )
        return "taken"

    def _decoded(self, call: int, bodies: Sequence[Buffer]) -> list[Tensor]:
        """What an island has moved, by place; nothing where it is not finite: all others would have it for ever."""
        found = [
            one.parcels.decode(read_bytes(body, torch.uint8), call)
            for one, body in zip(self.places, bodies, strict=True)
        ]
        return found if all(bool(torch.isfinite(moved).all()) for moved in found) else []

    def _settle(self, anchors: Sequence[Tensor]) -> None:
        shapes = {name: tuple(shape) for name, shape in self.records.shapes.items()}
        nesterov = self.settings.outer.optimizer == "nesterov"
        self.places = []
        for anchor, layout in zip(anchors, self.records.layouts, strict=True):
            segments, offset = [], 0
            for name, begin, numel in layout:
                segments.append(Segment(name, begin, numel, offset, 0))
                offset += numel
            momentum = torch.zeros_like(anchor) if nesterov else anchor.new_zeros(0)
            parcels = Parcels(self.settings.exchange, tuple(segments), _reductions(shapes))
            self.places.append(Place(anchor, momentum, momentum.clone(), parcels))


def _settings(terms: Mapping[str, Any]) -> Islands:
    """ValueError, KeyError or TypeError where `terms` are none."""
    if not (int(terms["ranks"]) > 0 and int(terms["max_staleness"]) > 0):
        raise ValueError(f"no terms: {terms}")
    return Islands.model_validate({key: terms[key] for key in ("exchange", "outer")})


def _is_fresh(head: Head, body: Buffer) -> bool:
    return not body


def _is_seed(head: Head, body: Buffer) -> bool:
    layout = [(str(name), int(begin), int(numel)) for name, begin, numel in head["layout"]]
    numels = [numel for _, _, numel in layout]
    known = {name for name, _, _ in layout} <= head["shapes"].keys() and int(head["claim"]) >= 0
    return known and min(numels, default=0) >= 0 and len(body) == 4 * sum(numels)


def _reductions(shapes: Mapping[str, tuple[int, ...]]) -> Reductions:
    run = Run(StepClock(), Meter())
    return Reductions(
        Site(Groups(group_of_one()), Parameters(shapes, list(shapes)), ResidualStores(transactional=False), run)
    )


def as_json(records: Records) -> dict[str, Any]:
    """What `Records.of` takes."""
    return asdict(records)
