"""Masters of weights that all ranks which share a layer hold alike, such as norms: who exchanges what of them.

Each of these ranks exchanges a part, and hands it on inside the island afterwards. So they go between islands once,
compressed as the others are, and their copies are the same bits whatever compression made of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from deepspeed_compress.communication.reduction import Parameters
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.engine.islands.division import IslandUnit
from deepspeed_compress.engine.weights.masters import FlatMasters, Stretch

__all__ = ["handed_on"]

_Range = tuple[str, int, int]
"""A parameter, and the first and the last element, exclusive."""


def handed_on(masters: FlatMasters, parameters: Parameters, unit: IslandUnit) -> FlatMasters:
    """`masters` without what others of the island exchange; to publish them is to hand on too. Collective.

    `parameters`: what ranks that share layers hold alike is exempt.
    """
    shared = parameters.exempt
    sizes = {name: torch.Size(shape).numel() for name, shape in parameters.shapes.items()}
    tensor, rank = unit.tensor, unit.get_model_parallel_rank()
    parts = {name: (sizes[name] * rank // tensor, sizes[name] * (rank + 1) // tensor) for name in shared}
    kept = [part for one in masters.stretches for part in _within(one, parts.get(one.parameter))]
    mine = [(one.parameter, one.begin, one.begin + one.values.numel()) for one in kept if one.parameter in shared]
    every: list[list[_Range]] = [[] for _ in unit.ranks]
    dist.all_gather_object(every, mine, group=unit.whole)
    parts_of_ranks = [_Part.of(masters, ranges) for ranges in every]
    return replace(masters, stretches=kept, publish=_Handing(masters, parts_of_ranks, unit).publish)


def _within(one: Stretch, part: tuple[int, int] | None) -> Iterator[Stretch]:
    """What of a stretch lies in a part of its parameter; all of it, if that is None."""
    end = one.begin + one.values.numel()
    first, last = (one.begin, end) if part is None else (max(one.begin, part[0]), min(end, part[1]))
    if first < last:
        yield Stretch(one.parameter, first, one.values.narrow(0, first - one.begin, last - first))


@dataclass(frozen=True)
class _Part:
    """What one rank of the island exchanges of such weights, one after the other: `numel` elements. `held`: those that
    this rank has too, and where they begin among them. Ranks that share layers may have cut their buffers elsewhere."""

    numel: int
    held: Sequence[tuple[Segment, int]]

    @classmethod
    def of(cls, masters: FlatMasters, ranges: Sequence[_Range]) -> "_Part":
        held, offset = [], 0
        for name, first, last in ranges:
            for one in (home for home in masters.stretches if home.parameter == name):
                same = _within(one, (first, last))
                held += [(_segment(found), offset + found.begin - first) for found in same]
            offset += last - first
        return cls(offset, held)


def _segment(one: Stretch) -> Segment:
    """For reading and writing: of no bucket."""
    return Segment(one.parameter, one.begin, one.values.numel(), 0, 0)


@dataclass(frozen=True)
class _Handing:
    """Every rank of the island tells the others its part. `masters`: all of this rank. `parts`: by place."""

    masters: FlatMasters
    parts: Sequence[_Part]
    unit: IslandUnit

    def publish(self) -> None:
        for place, part in enumerate(self.parts):
            if part.numel:
                self._tell(place, part)
        self.masters.publish()

    def _tell(self, place: int, part: _Part) -> None:
        segments = [segment for segment, _ in part.held]
        own = place == self.unit.place
        values = self.masters.read(segments) if own else torch.empty(part.numel, device=self.masters.device)
        dist.broadcast(values, self.unit.ranks[place], group=self.unit.whole)
        if segments and not own:
            found = [values.narrow(0, begin, segment.numel) for segment, begin in part.held]
            self.masters.write(segments, torch.cat(found))
