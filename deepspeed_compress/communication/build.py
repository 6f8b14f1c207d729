"""From the configuration to reducers: the only place that knows both."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.communication import (
    ClippingReducer,
    Delivery,
    DifferenceGather,
    Memory,
    PayloadReducer,
    PowerSGDReducer,
    Reducer,
    StepClock,
    TwoLevelReducer,
)
from deepspeed_compress.communication.gather import CHUNK_NUMEL, EXACT
from deepspeed_compress.communication.idle import warn_of_idle, warn_of_nothing
from deepspeed_compress.communication.low_rank import saves
from deepspeed_compress.compression.codec import Codec, Silence
from deepspeed_compress.compression.compressors import Cast, Compressor
from deepspeed_compress.compression.feedback import MomentumCorrection, Spread, WithFeedback, WithoutFeedback
from deepspeed_compress.compression.methods import codec_at, compressor_from
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.monitor import Meter

__all__ = [
    "RAW",
    "Groups",
    "Parameters",
    "Reduction",
    "Stores",
    "build_reduction",
    "build_weight_gather",
    "build_weight_reducer",
    "message_compressor",
]

WEIGHTS_LEVEL = 3
"""Of the reducer of gathered weights: its own messages and random numbers (see `PayloadReducer`)."""
RAW = 0
"""Codec of what goes uncompressed: elements in their own dtype."""


@dataclass(frozen=True)
class Groups:
    """The data-parallel group `whole`; with a hierarchy also its ranks on this node (`node`), and those of all nodes
    that have this rank's place on theirs (`across`). `downward`: a second group of the ranks that messages cross nodes
    between, for those to lower ranks; None where one group serves both ways."""

    whole: ProcessGroup
    node: ProcessGroup | None = None
    across: ProcessGroup | None = None
    downward: ProcessGroup | None = None


@dataclass(frozen=True)
class Parameters:
    """What the builder must know of the model.

    `shapes`: of this rank's parameters, by name. `everywhere`: what users call the parameters of all ranks. `exempt`:
    those that must go uncompressed whatever the configuration says. `dtype`: of the gradients, in which uncompressed
    elements travel. `calls`: what users call a parameter, where that is not its name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    everywhere: Sequence[str]
    exempt: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    calls: Mapping[str, str] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, int]:
        """Row length of each matrix; dimensions after the first count as one."""
        return {name: int(torch.Size(shape[1:]).numel()) for name, shape in self.shapes.items() if len(shape) > 1}

    def numel(self, name: str) -> int:
        return int(torch.Size(self.shapes[name]).numel())

    def called(self, name: str) -> str:
        """What the patterns of overrides match."""
        return self.calls.get(name, name)


@dataclass
class Stores:
    """The memories of a run, by what they hold; made when first asked for.

    `transactional`: the optimizer may skip a step.
    """

    transactional: bool
    by_name: dict[str, Residuals] = field(default_factory=dict)

    def get(self, name: str, dtype: str, on_host: bool = False, scaled: bool = True) -> Residuals:
        if name not in self.by_name:
            self.by_name[name] = Residuals(dtype, self.transactional, on_host, scaled)
        return self.by_name[name]


@dataclass(frozen=True)
class Reduction:
    """The reducer of a method; one that compresses nothing; one that besides sends what memories hold; the memories."""

    compressed: Reducer
    plain: Reducer
    draining: Reducer
    stores: Mapping[str, Residuals]


def build_reduction(
    config: CompressConfig, groups: Groups, parameters: Parameters, stores: Stores, clock: StepClock, meter: Meter
) -> Reduction:
    """Reducers for a method other than "none".

    `stores`: what is remembered between steps, which settings that take turns share. Warns of an override that matches
    no parameter, and when nothing is left to compress.
    """
    builder = _Builder(config, groups, parameters, stores, clock, meter)
    warn_of_nothing(config.gradients, _left(parameters, builder.codec_of, config.gradients), len(parameters.shapes))
    reducers = builder.compressed(), builder.plain(), builder.draining()
    return Reduction(*reducers, MappingProxyType(stores.by_name))


def _left(parameters: Parameters, codec_of: Callable[[str], int], settings: Any) -> list[str]:
    """Names of this rank's parameters that are compressed."""
    chosen = [name for name in parameters.shapes if codec_of(name) != RAW]
    if settings.method != "powersgd":
        return chosen
    return [name for name in chosen if codec_of(name) != 1 or saves(parameters.shapes[name], settings.rank)]


def message_compressor(gradients: Any) -> Compressor:
    """What a message under settings of `gradients` is made with, without memory and change of basis."""
    return compressor_from(gradients)


def build_weight_gather(
    config: CompressConfig, parameters: Parameters, clock: StepClock, meter: Meter
) -> Callable[..., DifferenceGather]:
    """What makes the gather of one flat buffer of weights (see `DifferenceGather`)."""
    raw = parameters.exempt | _small(parameters, config.weights)
    codecs = (Codec(compressor_from(config.weights)),)
    return partial(
        DifferenceGather,
        codecs=codecs,
        codec_of=lambda name: EXACT if name in raw else 1,
        clock=clock,
        meter=meter,
        seed=config.seed,
    )


def build_weight_reducer(
    config: CompressConfig, parameters: Parameters, clock: StepClock, meter: Meter
) -> Callable[[ProcessGroup, torch.dtype], PayloadReducer]:
    """What makes the reducer that gathers rounded weights over a group, without memory. What is not rounded travels
    in the given type.

    Every parameter has a codec of its own, though they are all the same, so that its blocks, and with them its
    rounding, do not depend on what is gathered along with it.
    """
    raw = parameters.exempt | _small(parameters, config.weights)
    place = {name: index for index, name in enumerate(parameters.shapes, 1)}
    rounded = [Codec(compressor_from(config.weights))] * len(place)
    memories = [WithoutFeedback()] * (1 + len(rounded))

    def make(group: ProcessGroup, dtype: torch.dtype) -> PayloadReducer:
        codecs = (Codec(Cast(dtype)), *rounded)
        return PayloadReducer(
            group,
            lambda step: codecs,
            memories,
            memories,
            lambda name: RAW if name in raw else place[name],
            clock,
            meter,
            config.seed,
            level=WEIGHTS_LEVEL,
            traffic="bytes_weights",
        )

    return make


def _small(parameters: Parameters, settings: Any) -> frozenset[str]:
    return frozenset(name for name in parameters.shapes if parameters.numel(name) < settings.min_numel)


@dataclass(frozen=True)
class _Treatment:
    """One codec of the table: what it is in each step, what a sender remembers, and how what arrives is handed on."""

    codec_at: Callable[[int], Codec]
    memory: Callable[[str], Memory]
    """From the name of a direction ("gradients", "means" ...) to its memory."""
    delivery: Delivery | None = None


class _Builder:
    """Puts the reducers of one configuration together."""

    def __init__(
        self,
        config: CompressConfig,
        groups: Groups,
        parameters: Parameters,
        stores: Stores,
        clock: StepClock,
        meter: Meter,
    ) -> None:
        self.settings: Any = config.gradients
        self.seed = config.seed
        self.groups = groups
        self.parameters = parameters
        self.stores = stores
        self.clock = clock
        self.meter = meter
        self.raw = _constant(Cast(parameters.dtype))
        self.codec_of = self._codecs()

    def plain(self) -> Reducer:
        """Nothing is compressed; in two levels too, so that less crosses the slow link."""
        return self._levels(lambda group, inside: self._payload(group, [self.raw], lambda name: RAW, level=int(inside)))

    def draining(self) -> Reducer:
        """Nothing is compressed; memories of what was left out are sent along, and are empty afterwards."""
        return self._levels(self._level(lambda treatment: replace(treatment, codec_at=self.raw.codec_at)))

    def compressed(self) -> Reducer:
        reducer = (
            self._powersgd() if self.settings.method == "powersgd" else self._levels(self._level(lambda same: same))
        )
        clip_norm = getattr(self.settings, "clip_norm", None)
        return ClippingReducer(reducer, clip_norm, self.clock) if clip_norm else reducer

    def _levels(self, level: Callable[[ProcessGroup, bool], PayloadReducer]) -> Reducer:
        """`level` makes the reducer of a group, given whether it is the one inside a node."""
        groups = self.groups
        if groups.node is None or groups.across is None:
            return level(groups.whole, False)
        return TwoLevelReducer(groups.whole, level(groups.node, True), level(groups.across, False))

    def _level(self, change: Callable[[_Treatment], _Treatment]) -> Callable[[ProcessGroup, bool], PayloadReducer]:
        """What makes the reducer of a group, inside a node or not; `change`: what becomes of each treatment."""

        def level(group: ProcessGroup, inside: bool) -> PayloadReducer:
            if inside:
                return self._inside(group, change)
            treatments = map(change, (self._treatment(self.settings), *self._overrides()))
            return self._payload(group, [self.raw, *treatments], self.codec_of)

        return level

    def _inside(self, group: ProcessGroup, change: Callable[[_Treatment], _Treatment]) -> PayloadReducer:
        settings = self.settings.hierarchy.inside
        if settings.method == "none":
            return self._payload(group, [self.raw], lambda name: RAW, level=1)
        between = ["none", self.settings.method, *(one.method for one in self.settings.overrides if not _is_raw(one))]
        treatments = [self.raw, change(self._treatment(settings))]
        return self._payload(
            group, treatments, lambda name: int(between[self.codec_of(name)] != "none"), "node", "node_means", 1
        )

    def _powersgd(self) -> Reducer:
        """Matrices of codec 1 by their factors; other parameters of codec 1, vectors for instance, uncompressed."""
        settings, group = self.settings, self.groups.whole
        factors = Cast(torch.float32) if settings.factors is None else compressor_from(settings.factors)
        feedback = settings.error_feedback
        return PowerSGDReducer(
            self._payload(group, [self.raw, self.raw, *self._overrides()], self.codec_of),
            self._payload(group, [_constant(factors)], lambda name: 0, level=2),
            self.parameters.shapes,
            settings.rank,
            self._store("gradients", feedback) if feedback is not None else None,
            self.stores.get("factors", "fp32", scaled=False),
            lambda name: self.codec_of(name) == 1,
            self.seed,
        )

    def _payload(
        self,
        group: ProcessGroup,
        treatments: Sequence[_Treatment],
        codec_of: Callable[[str], int],
        direction: str = "gradients",
        back: str = "means",
        level: int = 0,
    ) -> PayloadReducer:
        chunk_bytes = self.settings.chunk_bytes or CHUNK_NUMEL * group.size() * self.parameters.dtype.itemsize
        return PayloadReducer(
            group,
            lru_cache(maxsize=4)(lambda step: tuple(treatment.codec_at(step) for treatment in treatments)),
            [treatment.memory(direction) for treatment in treatments],
            [treatment.memory(back) for treatment in treatments],
            codec_of,
            self.clock,
            self.meter,
            self.seed,
            chunk_bytes // self.parameters.dtype.itemsize,
            {index: one.delivery for index, one in enumerate(treatments) if one.delivery is not None},
            level,
            self.groups.whole.rank(),
            downward=None if group is self.groups.node else self.groups.downward,
        )

    def _treatment(self, settings: Any) -> _Treatment:
        widths = self.parameters.widths
        return _Treatment(lambda step: codec_at(settings, widths, step), partial(self._memory, settings))

    def _overrides(self) -> list[_Treatment]:
        """Every override that is a codec of its own."""
        return [self._override(override) for override in self.settings.overrides if not _is_raw(override)]

    def _override(self, override: Any) -> _Treatment:
        inner = self.raw if override.method == "none" else self._treatment(override)
        if override.every == 1:
            return inner
        # Between two sends everything goes into the memory of error feedback.
        silent = Codec(Silence())
        spread = Spread(self._store("spread", self._kept), override.every) if override.spread else None
        return _Treatment(
            lambda step: inner.codec_at(step) if (step + 1) % override.every == 0 else silent, self._feedback, spread
        )

    def _memory(self, settings: Any, direction: str) -> Memory:
        """The memory that `settings` ask for; what comes back from the owner has error feedback alone."""
        if settings.method == "qsgd" and settings is not self.settings:
            # Unbiased, and too noisy for the error feedback of another method.
            return WithoutFeedback()
        kind = _MEMORIES.get(settings.method) if direction == "gradients" else None
        return kind(self, settings) if kind else self._feedback(direction)

    def _feedback(self, direction: str) -> Memory:
        if self._kept is None:
            return WithoutFeedback()
        return WithFeedback(self._store(direction, self._kept), getattr(self._kept, "decay", 1.0))

    @property
    def _kept(self) -> Any:
        """How memories are stored; None for no error feedback."""
        return self.settings.memory if hasattr(self.settings, "memory") else self.settings.error_feedback

    def momentum_correction(self, settings: Any) -> Memory:
        velocity, accumulated = (self._store(name, settings.memory) for name in ("velocity", "gradients"))
        return MomentumCorrection(velocity, accumulated, settings.momentum, settings.nesterov)

    def decoupled_momentum(self, settings: Any) -> Memory:
        return WithFeedback(self._store("gradients", settings.memory), settings.momentum, own_exact=False)

    def _store(self, name: str, settings: Any) -> Residuals:
        return self.stores.get(name, settings.dtype, settings.device == "cpu")

    def _codecs(self) -> Callable[[str], int]:
        """Parameter name to codec: of the first override that matches, else the chosen method's, which is 1."""
        overrides, called = self.settings.overrides, self.parameters.called
        exempt = {called(name) for name in self.parameters.exempt}
        warn_of_idle(overrides, [name for name in self.parameters.everywhere if name not in exempt])
        raw = self.parameters.exempt | _small(self.parameters, self.settings)
        own = [index for index, override in enumerate(overrides) if not _is_raw(override)]

        def codec_of(name: str) -> int:
            matches = (
                index for index, override in enumerate(overrides) if re.search(override.parameters, called(name))
            )
            found = next(matches, None)
            if name in raw or name == PADDING or (found is not None and found not in own):
                return RAW
            return 1 if found is None else 2 + own.index(found)

        return cache(codec_of)


_MEMORIES: Mapping[str, Callable[[_Builder, Any], Memory]] = MappingProxyType(
    {"dgc": _Builder.momentum_correction, "demo": _Builder.decoupled_momentum}
)


def _constant(compressor: Compressor) -> _Treatment:
    """The same in every step, and no memory."""
    codec = Codec(compressor)
    return _Treatment(lambda step: codec, lambda direction: WithoutFeedback())


def _is_raw(override: Any) -> bool:
    return bool(override.method == "none" and override.every == 1)
