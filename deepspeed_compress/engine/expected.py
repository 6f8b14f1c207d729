"""What one optimizer step will send for gradients, and what will be remembered, worked out before there is one.

All parameters are taken for a single bucket, so figures are those of large buckets: of small ones more is spent on
what each message needs besides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_compress.communication import ClippingReducer, PayloadReducer, PowerSGDReducer, Reducer, TwoLevelReducer
from deepspeed_compress.communication.buckets import Partition, even_partition, partition_by_sizes
from deepspeed_compress.communication.build import RAW
from deepspeed_compress.communication.plan import Piece, make_plans
from deepspeed_compress.compression.feedback import MomentumCorrection
from deepspeed_compress.compression.residuals import Residuals

__all__ = ["Cost", "cost", "mean_cost", "one_bucket", "uncompressed"]

LATE = 10**9
"""An optimizer step in which no density is still on its way."""
MOST = 64
"""Steps that are averaged over at most, where some parameters are sent every few steps."""


@dataclass(frozen=True)
class Cost:
    """Bytes that a rank sends in a step, and bytes that it keeps between steps."""

    sent: float = 0.0
    kept: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.sent + other.sent, self.kept + other.kept)


def one_bucket(sizes: Sequence[tuple[str, int]], ranks: int, apart: bool) -> Partition:
    """All parameters, given as (name, numel), in one bucket that is cut evenly; `apart`: each parameter by itself."""
    if not apart:
        return even_partition(sizes, ranks)
    return partition_by_sizes([(name, _shares(numel, ranks)) for name, numel in sizes], ranks)


def _shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    share = -(-numel // ranks)
    return [(rank, max(0, min(share, numel - rank * share))) for rank in range(ranks)]


def mean_cost(reducer: Reducer, partition: Partition, everywhere: bool, every: Sequence[int] = ()) -> Cost:
    """To reduce a bucket cut by `partition`, when warm-ups are over: a mean over steps, where some parameters are sent
    in one of `every` steps. `everywhere`: `all_reduce`, and not `reduce_scatter`."""
    steps = range(LATE, LATE + min(MOST, math.lcm(*every)))
    costs = [cost(reducer, partition, everywhere, step) for step in steps]
    return Cost(sum(one.sent for one in costs) / len(costs), max(one.kept for one in costs))


def cost(reducer: Reducer, partition: Partition, everywhere: bool, step: int) -> Cost:
    """As `mean_cost`, of one optimizer step (0-based)."""
    return _OF[type(reducer)].cost(reducer, partition, everywhere, step)


def uncompressed(reducer: Reducer, partition: Partition) -> set[str]:
    """Names of the parameters of `partition` that always go uncompressed."""
    return _OF[type(reducer)].raw(reducer, partition)


def _of_payload(reducer: PayloadReducer, partition: Partition, everywhere: bool, step: int) -> Cost:
    codecs, rank = reducer.codecs_at(step), reducer.group.rank()
    [plan] = make_plans(partition, codecs, reducer.codec_of)
    own = plan.pieces[rank]
    sent = [piece for owner, pieces in enumerate(plan.pieces) if owner != rank for piece in pieces]
    # Momentum is kept of own elements too, and so is what waits for another step.
    coded = [piece for piece in own if codecs[piece.codec].silent or not _exact(reducer.memories[piece.codec])]
    total = Cost(_length(sent), _kept(reducer.memories, [*sent, *coded]))
    if everywhere:
        # An owner sends its means to each of the others, and everybody gets all sums.
        total += Cost(_length(own) * (len(plan.pieces) - 1), _kept(reducer.mean_memories, own))
    return total + Cost(0, _kept(reducer.deliveries, [*sent, *own] if everywhere else own))


def _exact(memory: Any) -> bool:
    """Whether `memory` leaves a rank's own elements alone."""
    return getattr(memory, "own_exact", not isinstance(memory, MomentumCorrection))


def _length(pieces: Sequence[Piece]) -> int:
    return sum(piece.end - piece.begin for piece in pieces)


def _kept(memories: Any, pieces: Sequence[Piece]) -> int:
    """Of `pieces`, by what `memories`, indexed by codec, keep; deliveries are of some codecs alone."""
    known = dict(memories if isinstance(memories, Mapping) else enumerate(memories))
    held = [(vars(known[piece.codec]).values(), piece.numel) for piece in pieces if piece.codec in known]
    return sum(_bytes(store, numel) for stores, numel in held for store in stores if isinstance(store, Residuals))


def _bytes(store: Residuals, numel: int) -> int:
    return store.storage.payload_bytes(numel) * (2 if store.transactional else 1)


def _of_two_levels(reducer: TwoLevelReducer, partition: Partition, everywhere: bool, step: int) -> Cost:
    levels = reducer._levels(partition)
    node = cost(reducer.node, levels.node, everywhere, step)
    return node + cost(reducer.across, levels.across, everywhere, step)


def _of_powersgd(reducer: PowerSGDReducer, partition: Partition, everywhere: bool, step: int) -> Cost:
    plan = reducer.plan(partition)
    parts = [cost(reducer.factors, part, True, step) for part in (plan.p, plan.q)]
    whole = sum(segment.numel for segment in plan.whole)
    kept = _bytes(reducer.residuals, whole) if isinstance(reducer.residuals, Residuals) else 0
    kept += _bytes(reducer.warm, plan.q.numel) if isinstance(reducer.warm, Residuals) else 0
    return sum(parts, cost(reducer.others, plan.rest, everywhere, step) + Cost(0, kept))


def _raw_of_payload(reducer: PayloadReducer, partition: Partition) -> set[str]:
    codecs, names = reducer.codecs_at(LATE), {segment.parameter for segment in partition.segments}
    return {name for name in names if codecs[reducer.codec_of(name)] == codecs[RAW]}


@dataclass(frozen=True)
class _Kind:
    cost: Callable[[Any, Partition, bool, int], Cost]
    raw: Callable[[Any, Partition], set[str]]


_OF: Mapping[type, _Kind] = MappingProxyType(
    {
        ClippingReducer: _Kind(
            lambda reducer, *given: cost(reducer.reducer, *given),
            lambda reducer, partition: uncompressed(reducer.reducer, partition),
        ),
        PayloadReducer: _Kind(_of_payload, _raw_of_payload),
        PowerSGDReducer: _Kind(
            _of_powersgd, lambda reducer, partition: uncompressed(reducer.others, reducer.plan(partition).rest)
        ),
        TwoLevelReducer: _Kind(_of_two_levels, lambda reducer, partition: uncompressed(reducer.across, partition)),
    }
)
