"""Overlapped reductions of ZeRO 0 and 1: used if they prove right, and otherwise without any effect."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed_compress
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from deepspeed_compress.backends.deepspeed.gradients.parts import Zero1Gradients
from deepspeed_compress.collectives.buckets import partition_by_sizes
from tests.support.early import Program, Seen, check_equal, ordinary, train_both
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, engines, run
from tests.support.methods import FP32_SUMS, NONE
from tests.support.resuming import save_and_resume

SAMPLED = pytest.mark.sampled(4)

SMALL = {"reduce_bucket_size": 200}
"""Bucket size at which the gradients of the network make four buckets."""
RANDOM = {"gradients": {"method": "stochastic_linear", "bits": 4, "block_size": 32}}
"""Section of a method whose random numbers depend on the numbers of messages."""
INT4 = {"gradients": {"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}}


STAGES = [0, 1]
BUCKETS = {0: 3, 1: 4}


def reductions(engine: Any) -> EarlyReductions:
    stage = engine.zero_optimization_stage()
    found: EarlyReductions = (
        engine.optimizer.reduce_gradients if stage else engine.buffered_allreduce_fallback
    ).__self__
    return found


def both(rank: int, job: Job, program: Program) -> tuple[Seen, Seen]:
    # Without ZeRO, the configuration has no bucket size.
    return train_both(rank, job, program, reductions, 200)


def overflowing(engine: Any, rank: int, job: Job) -> list[float]:
    """Use a NaN in a batch of one rank, in a step with overlapped reductions."""
    batches = data(rank, job)
    if rank == 0:
        batches[-3][0][0, 0] = float("nan")
    return run(engine, batches)


def touched_by_a_hook(engine: Any, rank: int, job: Job) -> list[float]:
    """Halve gradients in every third step without autograd's knowledge, after they were sent."""
    for parameter in (engine.module[0].weight, engine.module[2].weight):
        parameter.register_post_accumulate_grad_hook(Halved())
    return run(engine, data(rank, job))


@dataclass
class Halved:
    calls: int = 0

    def __call__(self, parameter: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 3 == 0 and parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


def of_one_rank(engine: Any, rank: int, job: Job) -> list[float]:
    """Run backward twice through a layer on one rank, which changes gradients that were sent."""
    losses = []
    for step, (x, y) in enumerate(data(rank, job)):
        with checkpointed_twice(engine, step == 4 and rank == 1) as forward:
            loss = (forward(x) - y).square().mean()
            engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def checkpointed_twice(engine: Any, really: bool) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield the model's forward. With reentrant checkpoints, each part has a backward pass of its own."""
    if not really:
        yield engine
        return
    first = engine.module[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        again = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=True)
        with first.register_forward_hook(lambda layer, inputs, output: (output + again) / 2):
            return engine(x)

    yield forward


def given_up(engine: Any, rank: int, job: Job) -> list[float]:
    """Fail in one backward pass, later on one rank than on the other, and train another batch."""
    batches, losses = data(rank, job), []
    for step, (x, y) in enumerate(batches):
        if step == 4:
            interrupt(engine, engine.module[2 * rank].weight, (2 * x, y))
        losses += run(engine, [(x, y)])
    return losses


def interrupt(
    engine: Any,
    parameter: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor],
    within: AbstractContextManager[Any] | None = None,
) -> None:
    """Run a backward pass that fails at `parameter`, and discard its gradients."""
    with pytest.raises(RuntimeError, match="given up"), parameter.register_hook(fail), within or nullcontext():
        engine.backward((engine(batch[0]) - batch[1]).square().mean())
    for one in engine.module.parameters():
        one.grad = None


def loaded_after_a_failure(engine: Any, rank: int, job: Job) -> list[float]:
    """Load the newest checkpoint after a failure and train the failed batch again. Gradients must not be affected."""
    batches, directory = data(rank, job), str(job.extra["directory"])
    losses = run(engine, batches[:4])
    engine.save_checkpoint(directory)
    interrupt(engine, engine.module[2 * rank].weight, (2 * batches[4][0], batches[4][1]))
    engine.load_checkpoint(directory)
    assert not reductions(engine)._step.sent
    return losses + run(engine, batches[4:])


def loaded_with_the_same_gradients(engine: Any, rank: int, job: Job) -> list[float]:
    """Load a checkpoint after a failure and compute the same gradients again.

    A comparison with messages sent before the load would find no difference.
    """
    batches, directory = data(rank, job), str(job.extra["directory"])
    losses = run(engine, batches[:4])
    engine.save_checkpoint(directory)
    interrupt(engine, engine.module[0].bias, batches[4])
    engine.load_checkpoint(directory)
    return losses + run(engine, batches[4:])


def detached_after_a_failure(engine: Any, rank: int, job: Job) -> list[float]:
    batches = data(rank, job)
    losses = run(engine, batches[:4])
    interrupt(engine, engine.module[2 * rank].weight, (2 * batches[4][0], batches[4][1]))
    deepspeed_compress.detach(engine)
    losses += run(engine, batches[4:6])
    deepspeed_compress.attach(engine)
    return losses + run(engine, batches[6:])


def within_no_sync(engine: Any, rank: int, job: Job) -> list[float]:
    """Fail in a pass inside `no_sync`. The next step must not send anything from it."""
    batches, losses = data(rank, job), []
    for step, (x, y) in enumerate(batches):
        if step == 4:
            interrupt(engine, engine.module[2 * rank].weight, (2 * x, y), engine.no_sync())
        losses += run(engine, [(x, y)])
    return losses


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("given up")


PROGRAMS = {
    "ordinary": ordinary,
    "overflow": overflowing,
    "hook": touched_by_a_hook,
    "one rank": of_one_rank,
    "given up": given_up,
}


@SAMPLED
@pytest.mark.parametrize("section", [RANDOM, INT4], ids=["random", "int4"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("stage", STAGES)
def test_overlapped_reductions_change_no_bit(stage: int, name: str, section: dict[str, Any]) -> None:
    # Without ZeRO, only a guard skips a step whose gradients are not finite.
    guard = {"guard": {}} if stage == 0 and name == "overflow" else {}
    job = Job(stage, {**section, **guard}, SMALL, steps=8)
    ranks = run_forks(2, both, job, PROGRAMS[name])
    check_equal(ranks)
    first, second = (early for early, _ in ranks)
    assert first.agreed == second.agreed
    assert set(first.agreed) == ({True} if name in ("ordinary", "overflow") else {True, False})


@pytest.mark.parametrize("stage", STAGES)
def test_all_buckets_are_under_way_when_backward_is_over(stage: int) -> None:
    """This holds from the second step on. The first step shows what the buckets are."""
    for early, _ in run_forks(2, both, Job(stage, INT4, SMALL, steps=5), ordinary):
        assert early.under_way == [BUCKETS[stage]] * 4


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_disappointments_are_rare(stage: int) -> None:
    """Every failure doubles the required number of equal steps: 2 + 4 + 8 + 16 of 40 after the first four."""
    for early, _ in run_forks(2, both, Job(stage, INT4, SMALL, steps=40), touched_by_a_hook):
        assert 1 <= early.agreed.count(False) <= 5


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_which_has_to_learn_again_has_the_same_bits(stage: int, tmp_path: Path) -> None:
    for straight, resumed in run_forks(2, save_and_resume, Job(stage, RANDOM, SMALL, steps=8), str(tmp_path), 4):
        assert straight == resumed


INTERRUPTED = (loaded_after_a_failure, loaded_with_the_same_gradients, detached_after_a_failure, within_no_sync)


@SAMPLED
@pytest.mark.parametrize("program", INTERRUPTED)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_that_a_failed_pass_has_sent_survives(stage: int, program: Program, tmp_path: Path) -> None:
    job = Job(stage, RANDOM, SMALL, steps=8, extra={"directory": str(tmp_path)})
    check_equal(run_forks(2, both, job, program))


def chosen(rank: int, *jobs: Job) -> list[bool]:
    return [
        "reduce_gradients" in vars(engine.optimizer) or "buffered_allreduce_fallback" in vars(engine)
        for _, engine in engines(*jobs)
    ]


def test_nothing_begins_early_where_deepspeed_decides_otherwise() -> None:
    """ZeRO 2 and `overlap_comm` reduce during backward themselves, and `none` changes nothing."""
    written = [Job(1, INT4, {"overlap_comm": overlap}) for overlap in (True, False)]
    none = [Job(stage, NONE) for stage in STAGES]
    # The gradients of this optimizer are not those of the parameters.
    bf16 = Job(1, INT4, extra=FP32_SUMS)
    found = run_forks(2, chosen, Job(0, INT4), Job(1, INT4), Job(2, INT4), *written, *none, bf16)
    assert found == [[True, True, False, False, False, False, False, False]] * 2


def test_owners_lie_side_by_side_only_where_no_message_changes():
    parts = {"a": [(0, 4)], "b": [(1, 4)], "c": [(0, 2), (1, 2)]}
    names = list(parts)
    gradients = object.__new__(Zero1Gradients)
    gradients.partition = lambda keys: partition_by_sizes([(names[key[1]], parts[names[key[1]]]) for key in keys], 2)
    gradients._optimizer = SimpleNamespace(bit16_groups=[names], param_names={name: name for name in names})
    a, b, c = ((0, index, index) for index in range(3))
    assert gradients._side_by_side((b, a)) == (a, b)
    assert gradients._side_by_side((c, b, a)) == (c, a, b)
    # The second part of c would precede b in the message to rank 1.
    assert gradients._side_by_side((b, c, a)) == (b, c, a)
