"""Of the gradients that a reducer sends, the part that travels uncompressed: told from the layouts of its messages."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from deepspeed_compress.communication import ClippingReducer, PayloadReducer, PowerSGDReducer, Reducer, TwoLevelReducer
from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.build import RAW

__all__ = ["uncompressed_bytes"]


def uncompressed_bytes(reducer: Reducer, partition: Partition, everywhere: bool) -> int:
    """Bytes of gradients in their own type that this rank sends in this step to reduce a bucket cut by `partition`.

    They are of parameters that are exempt, small, or chosen by an override. `everywhere`: `all_reduce`, and not
    `reduce_scatter`.
    """
    return _OF[type(reducer)](reducer, partition, everywhere)


def _of_payload(reducer: PayloadReducer, partition: Partition, everywhere: bool) -> int:
    codecs = reducer.codecs_at(reducer.clock.step)
    raw = {index for index, codec in enumerate(codecs) if codec == codecs[RAW]}
    by_owner = [
        sum(
            piece.end - piece.begin
            for plan in reducer.plans(partition)
            for piece in plan.pieces[owner]
            if piece.codec in raw
        )
        for owner in range(partition.world_size)
    ]
    own = by_owner.pop(reducer.group.rank())
    # An owner sends its means to each of the others.
    return sum(by_owner) + (own * len(by_owner) if everywhere else 0)


def _of_two_levels(reducer: TwoLevelReducer, partition: Partition, everywhere: bool) -> int:
    levels = reducer._levels(partition)
    pairs = ((reducer.node, levels.node), (reducer.across, levels.across))
    return sum(uncompressed_bytes(level, part, everywhere) for level, part in pairs)


def _of_powersgd(reducer: PowerSGDReducer, partition: Partition, everywhere: bool) -> int:
    return uncompressed_bytes(reducer.others, reducer.plan(partition).rest, everywhere)


def _of_clipping(reducer: ClippingReducer, partition: Partition, everywhere: bool) -> int:
    return uncompressed_bytes(reducer.reducer, partition, everywhere)


_OF: Mapping[type, Callable[[Any, Partition, bool], int]] = MappingProxyType(
    {
        ClippingReducer: _of_clipping,
        PayloadReducer: _of_payload,
        PowerSGDReducer: _of_powersgd,
        TwoLevelReducer: _of_two_levels,
    }
)
