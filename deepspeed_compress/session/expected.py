"""What one optimizer step will send for gradients, and what will be kept between steps, worked out before there is one.

All parameters are taken for a single bucket, so figures are those of large buckets: of small ones more is spent on
what each message needs besides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.communication.buckets import Partition, even_partition, partition_by_sizes
from deepspeed_compress.communication.reducer import Reducer
from deepspeed_compress.config import CompressedGradients
from deepspeed_compress.session.session import Session

__all__ = ["LATE", "Cost", "cost", "mean_cost", "one_bucket", "uncompressed"]

LATE = 10**9
"""An optimizer step in which no density is still on its way."""
MOST = 64
"""Steps that are averaged over at most, where some parameters are sent every few steps."""


@dataclass(frozen=True)
class Cost:
    """Bytes that a rank sends in a step, and bytes that it keeps between steps."""

    sent: float = 0.0
    kept: float = 0.0


def one_bucket(sizes: Sequence[tuple[str, int]], ranks: int, apart: bool) -> Partition:
    """All parameters, given as (name, numel), in one bucket that is cut evenly; `apart`: each parameter by itself."""
    if not apart:
        return even_partition(sizes, ranks)
    return partition_by_sizes([(name, _shares(numel, ranks)) for name, numel in sizes], ranks)


def _shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    share = -(-numel // ranks)
    return [(rank, max(0, min(share, numel - rank * share))) for rank in range(ranks)]


def mean_cost(session: Session, partition: Partition, everywhere: bool) -> Cost:
    """Of what the configuration says, when warm-ups are over, to reduce a bucket cut by `partition`: a mean over steps,
    as overrides may send every few steps. `everywhere`: to all ranks, and not to the owners."""
    gradients = session.config.gradients
    every = [one.every for one in gradients.overrides] if isinstance(gradients, CompressedGradients) else []
    steps = range(LATE, LATE + min(MOST, math.lcm(*every)))
    costs = [cost(session.chosen_reducer(step), partition, everywhere) for step in steps]
    return Cost(sum(one.sent for one in costs) / len(costs), max(one.kept for one in costs))


def cost(reducer: Reducer, partition: Partition, everywhere: bool) -> Cost:
    """Of one optimizer step."""
    transfers = reducer.transfers(partition, everywhere)
    stored = [*reducer.stored(partition), *(pair for one in transfers for pair in one.stored())]
    return Cost(sum(one.bytes for one in transfers), sum(store.bytes_of(numel) for store, numel in stored))


def uncompressed(reducer: Reducer, partition: Partition) -> set[str]:
    """Names of the parameters of `partition` that go uncompressed wherever they go."""
    transfers = reducer.transfers(partition, everywhere=False)
    compressed = {name for one in transfers for name in one.names() - one.uncompressed_names()}
    return {name for one in transfers for name in one.names()} - compressed
