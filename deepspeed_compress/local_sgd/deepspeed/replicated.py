"""Exchange of weights that several ranks of an island hold: norms, and weights tied between pipeline stages.

Each rank that shares a layer exchanges a part of its norms, and the first stage exchanges tied weights. The rest of the
island receives them by a broadcast. So these weights are sent between islands only once, compressed like the others,
and all copies stay bit-identical whatever compression does.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights, MasterSlice
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.errors import UnsupportedError

_Range = tuple[str, int, int]
"""A parameter, its first element, and the end (exclusive)."""


@dataclass(frozen=True)
class SharedLayers:
    """Ranks of an island, of which `tensor` consecutive ones share each layer.

    Attributes:
        tensor: the number of ranks that share each layer.
        ranks: the global ranks of the island.
        whole: the group of these ranks; None for all ranks of the job.
        stages: the number of pipeline stages.
        copies: names of weights of this rank that are tied to those of an earlier stage.
    """

    tensor: int
    ranks: Sequence[int]
    whole: ProcessGroup | None
    stages: int = 1
    copies: Set[str] = frozenset()

    @property
    def place(self) -> int:
        """Return the index of this rank in the island."""
        return self.ranks.index(dist.get_rank())

    @property
    def hold_copies(self) -> bool:
        """Return True if several ranks may hold the same weights, apart from those of ZeRO. The same on all ranks."""
        return self.tensor > 1 or self.stages > 1


def divide_replicated(
    master_weights: FlatMasterWeights, parameters: Parameters, unit: SharedLayers
) -> FlatMasterWeights:
    """Return `master_weights` without the elements that other ranks of the island exchange. Collective.

    Their `publish` also broadcasts this rank's part within the island.

    Args:
        master_weights: the master weights of this rank.
        parameters: the parameters; `excluded` names those that other ranks hold, too.
        unit: this rank's island.
    """
    shared = parameters.excluded
    sizes = {name: torch.Size(shape).numel() for name, shape in parameters.shapes.items()}
    tensor, rank = unit.tensor, unit.place % unit.tensor
    parts = {name: (sizes[name] * rank // tensor, sizes[name] * (rank + 1) // tensor) for name in shared}
    parts |= dict.fromkeys(unit.copies, (0, 0))
    kept = [part for one in master_weights.slices for part in _within(one, parts.get(one.parameter))]
    mine = [(one.parameter, one.begin, one.begin + one.numel) for one in kept if one.parameter in shared]
    every = gather_objects(mine, unit.whole)
    parts_of_ranks = [_find_held(master_weights, ranges) for ranges in every]
    return replace(master_weights, slices=kept, publish=partial(_publish, master_weights, parts_of_ranks, unit))


def check_tied(unit: SharedLayers) -> None:
    """Check that weights tied between pipeline stages, if there are any, can be exchanged. Collective in the island.

    Raises:
        UnsupportedError: the stages are divided further, so that copies of one name differ.
    """
    tied = sorted({*chain(*gather_objects(unit.copies, unit.whole))})
    if tied and unit.tensor > 1:
        raise UnsupportedError(
            f"/deepspeed_compress/islands/elastic: {tied[0]} is tied between pipeline stages, which cannot be combined "
            f"with {unit.tensor} tensor-parallel ranks (allowed: one of the two); write untied weights"
        )


def _within(one: MasterSlice, part: tuple[int, int] | None) -> Iterator[MasterSlice]:
    """Yield the part of a run that lies in elements `part` of its parameter, if any; all of it if `part` is None."""
    found = one if part is None else one.part(*part)
    if found.numel:
        yield found


_Part = tuple[int, Sequence[tuple[Segment, int]]]
"""Part of the replicated weights that one rank of the island exchanges, as one flat vector.

It consists of the number of elements, and the segments that this rank has as well, with their offsets in the vector.
Ranks that share layers may have divided their buffers at different places.
"""


def _find_held(master_weights: FlatMasterWeights, ranges: Sequence[_Range]) -> _Part:
    """Return the part that consists of `ranges`, with the segments of it that `master_weights` has."""
    held, offset = [], 0
    for name, first, last in ranges:
        for one in (home for home in master_weights.slices if home.parameter == name):
            for same in _within(one, (first, last)):
                held.append((Segment(name, same.begin, same.numel, 0, 0), offset + same.begin - first))
        offset += last - first
    return offset, held


def _publish(master_weights: FlatMasterWeights, parts: Sequence[_Part], unit: SharedLayers) -> None:
    """Broadcast every part within the island, then publish the master weights. Collective.

    Args:
        master_weights: all master weights of this rank.
        parts: the part of each rank, by place in the island.
        unit: this rank's island.
    """
    for place, (numel, held) in enumerate(parts):
        if numel:
            segments, own = [segment for segment, _ in held], place == unit.place
            values = master_weights.read(segments) if own else torch.empty(numel, device=master_weights.device)
            dist.broadcast(values, unit.ranks[place], group=unit.whole)
            if segments and not own:
                found = [values.narrow(0, begin, segment.numel) for segment, begin in held]
                master_weights.write(segments, torch.cat(found))
    master_weights.publish()
