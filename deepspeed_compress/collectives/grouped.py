"""Reductions of a model whose parameters are not all averaged over the same ranks: a mixture of experts.

The experts of a layer may be spread over ranks. Then only some ranks hold the same experts, and their gradients are
averaged over those ranks. The parameters of a bucket determine its reducer, and all of them have the same group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Reducer
from deepspeed_compress.collectives.reduction import Groups, Reduction, ReductionContext, Reductions
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.config.places import AnyCompressedGradients


@dataclass(frozen=True)
class SeparateParameters:
    """Parameters that are averaged over other ranks than the rest of the model.

    Attributes:
        owner: name of these parameters, different for ranks that hold different parameters under equal names.
        names: their names on this rank.
        groups: the ranks that hold them.
    """

    owner: str
    names: frozenset[str]
    groups: Groups


@dataclass(frozen=True)
class GroupedReducers:
    """Reducers in force in one step.

    Attributes:
        every: the reducer of each group, beginning with the data-parallel group.
        places: index of the group of each parameter, by name. Other parameters have the data-parallel group.
    """

    every: Sequence[Reducer]
    places: Mapping[str, int]

    def of(self, partition: Partition) -> Reducer:
        """Return the reducer of the bucket that `partition` cuts."""
        names = (segment.parameter for segment in partition.segments if segment.parameter != PADDING)
        return self.every[self.places.get(next(names, PADDING), 0)]


class GroupedReductions:
    """Reductions of a model, by the group over which its parameters are averaged.

    Args:
        context: context of the data-parallel group.
        separate: parameters with other groups; empty for most models.
    """

    def __init__(self, context: ReductionContext, separate: Sequence[SeparateParameters] = ()) -> None:
        main = Reductions(context)
        # Messages of different groups have equal numbers, so their random numbers need different seeds.
        seeds = range(context.run.seed + 1, context.run.seed + 1 + len(separate))
        others = [main.over(one.groups, one.owner, seed) for one, seed in zip(separate, seeds, strict=True)]
        self.context = context
        self._every = (main, *others)
        self._places = {name: index for index, one in enumerate(separate, 1) for name in one.names}

    @property
    def groups(self) -> Sequence[Groups]:
        """Return the groups of ranks, those of the data-parallel group first."""
        return [reductions.context.groups for reductions in self._every]

    @property
    def parameters(self) -> Parameters:
        """Return the parameters of all groups."""
        return self.context.parameters

    def at(self, settings: AnyCompressedGradients, step: int) -> Sequence[Reduction]:
        """Return the reducers of each group for `settings` in optimizer step `step` (0-based)."""
        return [reductions.at(settings, step) for reductions in self._every]

    def grouped(self, reducers: Sequence[Reducer]) -> GroupedReducers:
        """Return `reducers`, one for each group, as they are found by the parameters of a bucket."""
        return GroupedReducers(reducers, self._places)
