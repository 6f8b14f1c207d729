"""Training with reductions that begin during backward, and without them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from deepspeed_compress.backends.deepspeed import engine_facts
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from deepspeed_compress.backends.deepspeed.node_shards import NodeShards
from tests.support.jobs import Job, data, run, start, weights

Program = Callable[[Any, int, Job], list[float]]
"""Training of an engine, which returns the losses."""


@dataclass(frozen=True)
class Seen:
    """Records of a run.

    `under_way` holds the number of buckets sent by the end of backward, for each step that compares, and `agreed`
    whether they were right. `buckets` is the number of buckets of the last step.
    """

    losses: list[str]
    parameters: dict[str, list[float]]
    under_way: list[int]
    agreed: list[bool]
    buckets: int


def train_both(
    rank: int, job: Job, program: Program, reductions_of: Callable[[Any], EarlyReductions], smallest: int
) -> tuple[Seen, Seen]:
    """Train with early reductions, and without them, in buckets of at least `smallest` elements if the job has none."""
    with patch.object(engine_facts, "SMALLEST_BUCKET", smallest):
        return _train(rank, job, program, reductions_of, True), _train(rank, job, program, reductions_of, False)


def _train(rank: int, job: Job, program: Program, reductions_of: Callable[[Any], EarlyReductions], early: bool) -> Seen:
    engine = start(job)
    reductions, under_way, agreed = reductions_of(engine), [], []
    if not early:
        reductions._history.patience = 10**9
    agree = reductions._agree

    def watched(step: Any, reducer: Any) -> bool:
        under_way.append(len(step.sent))
        agreed.append(agree(step, reducer))
        return agreed[-1]

    reductions._agree = watched  # type: ignore[method-assign]  # replaced for this test
    losses, buckets = program(engine, rank, job), len(reductions._history.plan)
    seen = Seen([str(loss) for loss in losses], weights(engine), under_way, agreed, buckets)
    engine.destroy()
    return seen


def ordinary(engine: Any, rank: int, job: Job) -> list[float]:
    return run(engine, data(rank, job))


def check_equal(ranks: list[tuple[Seen, Seen]]) -> None:
    """Check that what was sent during backward has changed no bit, and that all ranks have the same weights."""
    for early, late in ranks:
        assert (early.losses, early.parameters) == (late.losses, late.parameters)
        assert late.agreed == []
    assert all(early.parameters == ranks[0][0].parameters for early, _ in ranks)


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
