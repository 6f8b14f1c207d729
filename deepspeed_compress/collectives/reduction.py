"""Builds the reducers of gradients for the settings in force in a step. Only this module depends on both.

`Reductions.at` resolves the settings of a step into one frozen description (`Codecs`, then `Messages`) and caches the
reducers of the most recent descriptions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.parameters import (
    MAIN,
    Parameters,
    find_channels,
    find_low_rank,
    overrides_with_channel,
)
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.powersgd import PowerSGDReducer
from deepspeed_compress.collectives.reducer import ClippingReducer, Reducer, Run
from deepspeed_compress.collectives.two_level import HierarchicalReducer, HybridReducer
from deepspeed_compress.compression.codec import Codec, NoSend
from deepspeed_compress.compression.compressors import Cast
from deepspeed_compress.compression.feedback import Feedback, NoFeedback, SpreadSum
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.config import MethodConfig, PowerSGDGradients
from deepspeed_compress.config.overrides import Override, OverrideConfig
from deepspeed_compress.config.places import AnyCompressedGradients, DGCGradients, LayeredGradients, NodeConfig

ChannelsOf = Callable[[AnyCompressedGradients], Mapping[str, int]]
"""Function that returns the channels for given settings; see `find_channels`."""
FACTORS_LEVEL = 2
"""Level of the reducer of low-rank factors (see `Messages`). Level 0 is between nodes and level 1 inside a node."""
SETTINGS = 16
"""Number of settings whose reducers are cached, since adaptation candidates and guard levels alternate."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a reduction.

    Attributes:
        whole: the data-parallel group.
        node: with a hierarchy, the ranks of `whole` on this node.
        across: with a hierarchy, the ranks with the same local rank on every node.
        downward: second group of the ranks whose messages cross nodes; see `Link`.
        copies: True if every node holds a complete copy of the model, so that owners are ranks of `node`.
    """

    whole: ProcessGroup
    node: ProcessGroup | None = None
    across: ProcessGroup | None = None
    downward: ProcessGroup | None = None
    copies: bool = False


@dataclass(frozen=True)
class ReductionContext:
    """Everything a reduction needs that does not depend on the settings.

    `traffic` is the meter's name for the bytes sent.
    """

    groups: Groups
    parameters: Parameters
    stores: ResidualStores
    run: Run
    traffic: str = "bytes_sent"


@dataclass(frozen=True)
class Reduction:
    """The reducers for one set of settings.

    Attributes:
        compressed: reducer of the method.
        plain: reducer without compression.
        flushing: reducer without compression that also sends, and thereby empties, the residuals.
    """

    compressed: Reducer
    plain: Reducer
    flushing: Reducer

    def reducer(self, dense: bool, flush: bool) -> Reducer:
        """Return the reducer of a step that sends everything uncompressed if `dense`, and the residuals if `flush`."""
        if flush:
            return self.flushing
        return self.plain if dense else self.compressed


@dataclass(frozen=True)
class Codecs:
    """Codecs of the messages of one step.

    Attributes:
        main: codec of the method.
        overrides: codecs of the overrides that have their own channel.
        inside: codec of the method inside a node; None if there is no such method.
    """

    main: Codec
    overrides: tuple[Codec, ...] = ()
    inside: Codec | None = None


class Reductions:
    """Reducers of a run for any gradient settings.

    The first use of settings emits a CompressWarning for each override that matches no parameter, and if nothing is
    left to compress.

    Args:
        context: the groups, parameters and stores of the reducers.
        channels_of: returns the channels for given settings, where other reductions of the same model have found them
            already; None to find them, and to emit the warnings.
    """

    def __init__(self, context: ReductionContext, channels_of: ChannelsOf | None = None) -> None:
        self.context = context
        # Not bound methods: a reference cycle would keep the process groups alive until garbage collection.
        self.channels_of = channels_of or lru_cache(maxsize=SETTINGS)(partial(find_channels, context.parameters))
        self._reduction = lru_cache(maxsize=SETTINGS)(partial(_make_reduction, context, self.channels_of))

    def at(self, settings: AnyCompressedGradients, step: int) -> Reduction:
        """Return the reducers for `settings` in optimizer step `step` (0-based)."""
        return self._reduction(settings, find_codecs(settings, self.context.parameters, step))


def find_codecs(settings: AnyCompressedGradients, parameters: Parameters, step: int) -> Codecs:
    """Return the codecs of optimizer step `step`.

    A method without messages of its own (PowerSGD) sends everything that it does not approximate uncompressed.
    """
    raw, widths = Codec(Cast(parameters.dtype)), parameters.widths
    main = Codec(settings.compressor(step), settings.transform(widths)) if isinstance(settings, MethodConfig) else raw
    inside = settings.hierarchy.inside if isinstance(settings, LayeredGradients) and settings.hierarchy else None
    return Codecs(
        main,
        tuple(_override_codec(one, raw, step) for one in overrides_with_channel(settings)),
        Codec(inside.compressor(step)) if isinstance(inside, MethodConfig) else None,
    )


def _override_codec(override: Override, raw: Codec, step: int) -> Codec:
    if (step + 1) % override.every:
        # Between two sends, everything is added to the error-feedback buffer.
        return Codec(NoSend())
    return Codec(override.compressor(step)) if isinstance(override, MethodConfig) else raw


def _make_reduction(
    context: ReductionContext, channels_of: ChannelsOf, settings: AnyCompressedGradients, codecs: Codecs
) -> Reduction:
    builder = _ReducerBuilder(context, settings, codecs, channels_of(settings))
    return Reduction(builder.compressed(), builder.plain(), builder.flushing())


@dataclass(frozen=True)
class _ReducerBuilder:
    """Builder of the reducers for given settings, codecs and channels."""

    context: ReductionContext
    settings: AnyCompressedGradients
    codecs: Codecs
    channel_of: Mapping[str, int]

    @cached_property
    def raw(self) -> Channel:
        return Channel(Codec(Cast(self.context.parameters.dtype)), uncompressed=True)

    def compressed(self) -> Reducer:
        settings = self.settings
        if isinstance(settings, PowerSGDGradients):
            return self._powersgd(settings)
        reducer = self._levels(Messages(tuple(self._channels()), self.channel_of), self._inside())
        clip_norm = settings.clip_norm if isinstance(settings, DGCGradients) else None
        return reducer if clip_norm is None else ClippingReducer(reducer, clip_norm, self.context.run.clock)

    def plain(self) -> Reducer:
        """Return a reducer without compression.

        It still has two levels if configured, to reduce traffic on the slow link.
        """
        return self._levels(Messages((self.raw,)), Messages((self.raw,), level=1))

    def flushing(self) -> Reducer:
        """Return a reducer without compression that also sends the residuals and leaves them empty."""
        return self._levels(
            self._uncompressed(Messages(tuple(self._channels()), self.channel_of)), self._uncompressed(self._inside())
        )

    def _uncompressed(self, messages: Messages) -> Messages:
        """Return `messages` with the same feedback and an uncompressed codec on every channel."""
        channels = (replace(channel, codec=self.raw.codec, uncompressed=True) for channel in messages.channels)
        return replace(messages, channels=tuple(channels))

    def _levels(self, messages: Messages, inside: Messages) -> Reducer:
        """Return a reducer with one level, or two if the groups define nodes. `inside`: messages in a node."""
        groups = self.context.groups
        if groups.node is None or groups.across is None:
            return self._payload(groups.whole, messages, groups.downward)
        across = self._payload(groups.across, messages, groups.downward)
        if groups.copies:
            return HybridReducer(self._payload(groups.node, inside), across)
        return HierarchicalReducer(groups.whole, self._payload(groups.node, inside), across)

    def _payload(self, group: ProcessGroup, messages: Messages, downward: ProcessGroup | None = None) -> PayloadReducer:
        context, itemsize = self.context, self.context.parameters.dtype.itemsize
        chunk_bytes = self.settings.chunk_bytes or context.run.chunk_numel * group.size() * itemsize
        link = Link(group, downward, context.groups.whole.rank())
        return PayloadReducer(link, messages, context.run, chunk_bytes // itemsize, context.traffic)

    def _channels(self) -> Iterator[Channel]:
        """Yield the channels between nodes: uncompressed, the method's, and the overrides'."""
        settings, stores = self.settings, self.context.stores
        yield self.raw
        yield self._channel(
            self.codecs.main, settings.gradient_feedback(stores), settings.residual_feedback(stores, "means")
        )
        yield from self._override_channels()

    def _override_channels(self) -> Iterator[Channel]:
        kept = self.settings.residuals
        for override, codec in zip(overrides_with_channel(self.settings), self.codecs.overrides, strict=True):
            feedback, back = (self._feedback(override, name) for name in ("gradients", "means"))
            spread = None
            if override.spread and kept is not None:
                store = self.context.stores.get("spread", kept.dtype, kept.on_host)
                spread = SpreadSum(store, override.every)
            yield self._channel(codec, feedback, back, spread)

    def _channel(self, codec: Codec, feedback: Feedback, back: Feedback, spread: SpreadSum | None = None) -> Channel:
        """Return a channel, marked as uncompressed if its codec keeps the gradient dtype (`bf16` under bf16)."""
        return Channel(codec, feedback, back, spread, uncompressed=codec == self.raw.codec)

    def _feedback(self, method: Override | NodeConfig, name: str) -> Feedback:
        """Return the feedback of a method that replaces the chosen one in an override or inside a node."""
        collects = isinstance(method, OverrideConfig) and method.every > 1
        if method.method == "qsgd" and not collects:
            # qsgd is unbiased, and too noisy for the error feedback of another method.
            return NoFeedback()
        return self.settings.residual_feedback(self.context.stores, name)

    def _inside(self) -> Messages:
        """Return the messages inside a node.

        If the hierarchy has its own method, it applies to the parameters that are compressed between nodes.
        """
        settings = self.settings
        hierarchy = settings.hierarchy if isinstance(settings, LayeredGradients) else None
        if hierarchy is None or self.codecs.inside is None:
            return Messages((self.raw,), level=1)
        inside = hierarchy.inside
        there, back = (self._feedback(inside, name) for name in ("node", "node_means"))
        sent = [settings.method, *(override.method for override in overrides_with_channel(settings))]
        chosen = {name: 1 for name, index in self.channel_of.items() if sent[index - MAIN] != "none"}
        return Messages((self.raw, self._channel(self.codecs.inside, there, back)), chosen, level=1)

    def _powersgd(self, settings: PowerSGDGradients) -> Reducer:
        """Return a reducer that sends the matrices of the main channel as low-rank factors.

        The other parameters of the channel, such as vectors, are sent uncompressed together with their residuals.
        """
        context, kept = self.context, settings.residuals
        # Residuals that other settings left for parameters without factors are sent once.
        left, left_back = (settings.residual_feedback(context.stores, name) for name in ("gradients", "means"))
        rest = replace(self.raw, feedback=left, mean_feedback=left_back)
        others = Messages((self.raw, rest, *self._override_channels()), self.channel_of)
        factors = Messages((Channel(Codec(settings.factor_compressor())),), level=FACTORS_LEVEL)
        return PowerSGDReducer(
            self._payload(context.groups.whole, others, context.groups.downward),
            self._payload(context.groups.whole, factors, context.groups.downward),
            find_low_rank(settings, context.parameters, self.channel_of),
            None if kept is None else context.stores.get("gradients", kept.dtype, kept.on_host),
            context.stores.get("factors", "fp32", scaled=False),
        )


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
        self.context = context
        self._every = [Reductions(context)]
        for seed, one in enumerate(separate, context.run.seed + 1):
            # Messages of different groups have equal numbers, so their random numbers need different seeds.
            run, stores = replace(context.run, seed=seed), context.stores.of(one.owner)
            other = replace(context, groups=one.groups, stores=stores, run=run)
            self._every.append(Reductions(other, self._every[0].channels_of))
        self._places = {name: index for index, one in enumerate(separate, 1) for name in one.names}

    @property
    def groups(self) -> Sequence[Groups]:
        """Return the groups of ranks, those of the data-parallel group first."""
        return [reductions.context.groups for reductions in self._every]

    def at(
        self, settings: AnyCompressedGradients, step: int, dense: bool = False, flush: bool = False
    ) -> GroupedReducers:
        """Return the reducers for `settings` in optimizer step `step` (0-based).

        Args:
            settings: the settings of gradients.
            step: the optimizer step.
            dense: send everything uncompressed.
            flush: send the residuals, too, and everything uncompressed.
        """
        every = [reductions.at(settings, step).reducer(dense, flush) for reductions in self._every]
        return GroupedReducers(every, self._places)
