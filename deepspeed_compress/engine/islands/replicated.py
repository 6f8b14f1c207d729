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
from deepspeed_compress.errors import UnsupportedError

__all__ = ["check_cut_alike", "handed_on"]

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
    mine = [(one.parameter, one.begin, one.begin + one.numel) for one in kept if one.parameter in shared]
    every: list[list[_Range]] = [[] for _ in unit.ranks]
    dist.all_gather_object(every, mine, group=unit.whole)
    parts_of_ranks = [_Part.of(masters, ranges) for ranges in every]
    return replace(masters, stretches=kept, publish=_Handing(masters, parts_of_ranks, unit).publish)


def check_cut_alike(masters: FlatMasters, parameters: Parameters, unit: IslandUnit) -> None:
    """UnsupportedError where ranks that share layers have cut what they hold alike in different places: second moments
    are exchanged by each of them, and their blocks would not be the same. Collective in the island."""
    cuts = [(one.parameter, one.begin, one.numel) for one in masters.stepped if one.parameter in parameters.exempt]
    every: list[Sequence[tuple[str, int, int]]] = [[] for _ in unit.ranks]
    dist.all_gather_object(every, cuts, group=unit.whole)
    if any(one != every[place - place % unit.tensor] for place, one in enumerate(every)):
        raise UnsupportedError(
            "/deepspeed_compress/islands/second_moments: the tensor ranks have unequal parts of layers, so they cut "
            "what is alike on them in different places (allowed with it: heads and widths that they divide); write "
            '"second_moments": null, or another number of tensor ranks'
        )


def _within(one: Stretch, part: tuple[int, int] | None) -> Iterator[Stretch]:
    """What of a stretch lies in a part of its parameter; all of it, if that is None."""
    found = one if part is None else one.part(*part)
    if found.numel:
        yield found


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
    return Segment(one.parameter, one.begin, one.numel, 0, 0)


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
