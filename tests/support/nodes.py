"""Engines that shard within nodes, whose gradients travel to other nodes during backward."""

from typing import Any

from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from deepspeed_compress.backends.deepspeed.node_shards import NodeShards
from tests.support.early import Program, Seen, train_both
from tests.support.jobs import Job


def nodes_of(engine: Any) -> NodeShards:
    """Return what averages the gradients of `engine` over the nodes."""
    found: NodeShards = engine._take_model_step.func.__self__.nodes
    return found


def early_of(engine: Any) -> EarlyReductions:
    found = nodes_of(engine)._early
    assert found is not None
    return found


def train_nodes(rank: int, job: Job, program: Program) -> tuple[Seen, Seen]:
    """Train with exchanges during backward, and without them."""
    return train_both(rank, job, program, early_of, 100)
