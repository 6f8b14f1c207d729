"""Buckets that travel to other nodes during backward: used if they prove right, and otherwise without any effect."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import deepspeed_compress
from deepspeed_compress.backends.deepspeed import engine_facts
from deepspeed_compress.collectives.exchange import Link
from tests.support.early import Program, check_equal, early_of, nodes_of, ordinary, train_nodes
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, network, run, start
from tests.support.methods import BF16, FP32_SUMS

SAMPLED = pytest.mark.sampled(12)
RANDOM = {
    "gradients": {"method": "stochastic_linear", "bits": 4, "block_size": 32, "min_numel": 0},
    "parallelism": {"shard_within": 2},
}
"""Section of a method whose random numbers depend on the numbers of messages."""


def backward(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = (engine(batch[0]) - batch[1]).square().mean()
    engine.backward(loss)
    return float(loss.detach())


def several_backwards(engine: Any, rank: int, job: Job) -> list[float]:
    """Run two backward passes before every third step. The second one changes what the first one has sent."""
    losses = []
    for step, batch in enumerate(data(rank, job)):
        losses.append(backward(engine, batch))
        if step % 3 == 2:
            losses.append(backward(engine, (2 * batch[0], batch[1])))
        engine.step()
    return losses


def written_on_one_rank(engine: Any, rank: int, job: Job) -> list[float]:
    """Halve the gradients of one rank before a step, after they were sent."""
    losses = []
    for step, batch in enumerate(data(rank, job)):
        losses.append(backward(engine, batch))
        if (step, rank) == (4, 3):
            engine.optimizer.averaged_gradients[0][0].data.mul_(0.5)
        engine.step()
    return losses


def given_up(engine: Any, rank: int, job: Job) -> list[float]:
    """Give a step up after its backward pass, load a checkpoint, and train the batch again."""
    batches, directory = data(rank, job), str(job.extra["directory"])
    losses = run(engine, batches[:4])
    engine.save_checkpoint(directory)
    backward(engine, (2 * batches[4][0], batches[4][1]))
    engine.load_checkpoint(directory)
    assert not early_of(engine)._step.sent
    return losses + run(engine, batches[4:])


@SAMPLED
@pytest.mark.parametrize("extra", [{}, BF16, FP32_SUMS], ids=["fp32", "bf16", "bf16, sums in fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_buckets_are_under_way_when_backward_is_over(stage: int, accumulation: int, extra: dict[str, Any]) -> None:
    """This holds from the second step on. The first step shows when buckets are complete."""
    if stage == 1:
        extra = {name: value for name, value in extra.items() if name != "data_types"}
    ranks = run_forks(4, train_nodes, Job(stage, RANDOM, extra=extra, accumulation=accumulation), ordinary)
    check_equal(ranks)
    for early, _ in ranks:
        assert early.buckets > 1
        assert early.under_way == [early.buckets] * 3
        assert early.agreed == [True] * 3


@SAMPLED
@pytest.mark.parametrize("program", [several_backwards, written_on_one_rank])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_change_are_sent_again(stage: int, program: Program) -> None:
    ranks = run_forks(4, train_nodes, Job(stage, RANDOM, steps=8), program)
    check_equal(ranks)
    agreed = [early.agreed for early, _ in ranks]
    # Ranks of equal place in their nodes agree with one another.
    assert agreed[:2] == agreed[2:]
    assert False in agreed[1]
    assert True in agreed[1]
    assert (False in agreed[0]) == (program is several_backwards)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_not_finite_travel_too(stage: int) -> None:
    """All nodes skip the step."""
    ranks = run_forks(4, train_nodes, Job(stage, RANDOM, steps=6, poison=(4, 3)), ordinary)
    check_equal(ranks)
    assert all(early.agreed == [True] * 5 for early, _ in ranks)
    assert all(math.isfinite(value) for values in ranks[0][0].parameters.values() for value in values)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_that_was_sent_survives_a_load(stage: int, tmp_path: Path) -> None:
    job = Job(stage, RANDOM, steps=8, extra={"directory": str(tmp_path)})
    check_equal(run_forks(4, train_nodes, job, given_up))


def gradients_between_steps(rank: int, job: Job) -> list[int]:
    """Return the number of gradients that are not 0 before the first step and after the last one."""
    engine = start(job)
    gradients, found = nodes_of(engine)._gradients, []
    for batches in ([], data(rank, job)):
        run(engine, batches)
        found.append(sum(int(gradients.of(key).count_nonzero()) for keys in gradients.buckets for key in keys))
    return found


@SAMPLED
@pytest.mark.parametrize(("stage", "extra"), [(1, BF16), (2, FP32_SUMS)])
def test_a_rank_that_has_reduced_nothing_has_zeros(stage: int, extra: dict[str, Any]) -> None:
    """It sends them if a backward pass has failed there earlier than on other ranks."""
    assert run_forks(4, gradients_between_steps, Job(stage, RANDOM, extra=extra)) == [[0, 0]] * 4


def default_bucket(rank: int, job: Job) -> int:
    """Return the size of the buckets inside the node, in elements, if the file has none."""
    config = job.config()
    del config["zero_optimization"]["reduce_bucket_size"]
    with patch.object(engine_facts, "SMALLEST_BUCKET", 1):
        engine = deepspeed_compress.initialize(model=network(), config=config)[0]
        return int(engine.optimizer.reduce_bucket_size)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_a_node_reduce_in_equal_buckets(stage: int) -> None:
    """Their shards have unequal numbers of elements. Unequal buckets would be added to one another."""
    numel = sum(parameter.numel() for parameter in network().parameters())
    assert run_forks(4, default_bucket, Job(stage, RANDOM)) == [numel // engine_facts.BUCKETS] * 4


@contextmanager
def begun_over(group: dist.ProcessGroup) -> Iterator[list[str]]:
    """Note what the program begins over `group`, in order, which must be the same on all of its ranks on NCCL."""
    begun: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            over = args[0].group if name == "start_split" else options.get("group")
            # Means return in a thread, in the same order on all ranks.
            if over is group and current_thread() is main_thread():
                begun.append(name)
            return original(*args, **options)

        return call

    with ExitStack() as stack:
        for owner, name in ((Link, "start_split"), (dist, "all_reduce"), (dist, "all_gather"), (dist, "broadcast")):
            stack.enter_context(patch.object(owner, name, noted(name, getattr(owner, name))))
        yield begun


def failing(engine: Any, rank: int, job: Job) -> None:
    """Load a checkpoint after a step whose backward pass only the second node has run."""
    directory, batches = str(job.extra["directory"]), data(rank, job)
    engine.save_checkpoint(directory)
    if rank > 1:
        backward(engine, batches[-1])
    engine.load_checkpoint(directory)
    run(engine, batches[-1:])


def orders(rank: int, job: Job) -> list[str]:
    with patch.object(engine_facts, "SMALLEST_BUCKET", 100):
        engine = start(job)
    run(engine, data(rank, job)[:3])
    early = early_of(engine)
    assert len(early._history.order) > 1
    with begun_over(early._gradients.group) as begun:
        failing(engine, rank, job)
    engine.destroy()
    return begun


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nodes_begin_their_exchanges_in_one_order(stage: int, tmp_path: Path) -> None:
    """NCCL matches them by their order, and may not find out that two are different."""
    begun = run_forks(4, orders, Job(stage, RANDOM, extra={"directory": str(tmp_path)}))
    assert begun[:2] == begun[2:]
    assert begun[0].count("start_split") > 1
