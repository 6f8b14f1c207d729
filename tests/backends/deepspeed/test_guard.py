"""Faults during training: training survives, ranks decide alike, and events describe what happened."""

import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_compress.checkpointing.deepspeed.checkpoint import load_last
from deepspeed_compress.errors import CompressWarning, StateError
from tests.backends.deepspeed import network_rank as language
from tests.support.faults import FAULT, GUARD, Disturb, Story, exploding, live, live_on, not_a_number, poison, train_one
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, own_data, run, start, steady_data, train, weights
from tests.support.methods import BF16, FP32_SUMS, UNCLIPPED
from tests.support.seeds import SEEDS, Excess

pytestmark = pytest.mark.sampled(4)

STEPS = 60
GUARDED = {"gradients": {"bits": 4}, "guard": GUARD}
KINDS: dict[str, Job] = {
    "zero 0": Job(0, GUARDED, steps=STEPS),
    "zero 0, no clipping": Job(0, GUARDED, extra=UNCLIPPED, steps=STEPS),
    "zero 1": Job(1, GUARDED, steps=STEPS),
    "zero 2": Job(2, GUARDED, steps=STEPS),
    "zero 3": Job(3, GUARDED, steps=STEPS),
    "zero 2, bf16": Job(2, GUARDED, extra=BF16, steps=STEPS),
    "bf16 optimizer": Job(1, GUARDED, extra={**FP32_SUMS, "zero_allow_untested_optimizer": True}, steps=STEPS),
}
OFTEN = {"zero 0", "zero 2", "zero 3", "bf16 optimizer"}
"""Kinds of engines in CI. The others are tested only in long runs."""
EVERY = pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)


def nothing(engine: Any, rank: int, step: int) -> float:
    return 1.0


def poison_nan(engine: Any, rank: int, step: int) -> float:
    return poison(engine, rank, step, math.nan)


def both(job: Job, disturb: Disturb) -> Story:
    """Return the story of rank 0 after checking that both ranks have the same one."""
    first, second = run_forks(2, live, job, disturb)
    assert first.events == second.events
    assert first.settings == second.settings
    assert first.skipped == second.skipped
    assert math.isfinite(first.final)
    return first


@EVERY
def test_without_a_fault_a_guard_changes_no_bit(kind: str) -> None:
    job = replace(KINDS[kind], steps=14)
    unguarded = replace(job, section={"gradients": {"bits": 4}})
    for with_guard, without in run_forks(2, train, job, unguarded):
        assert with_guard == without


@EVERY
def test_a_nan_on_one_rank_is_skipped(kind: str) -> None:
    story = both(KINDS[kind], not_a_number)
    assert story.skipped == 1
    assert story.events[0] == f"{FAULT + 1} anomaly blockwise bits=4 -> none"
    assert [event.split()[1] for event in story.events[-2:]] == ["return", "return"]
    assert story.events[-1].endswith("blockwise bits=8 -> blockwise bits=4")


@EVERY
def test_exploding_gradients_are_skipped(kind: str) -> None:
    story = both(KINDS[kind], exploding)
    assert story.skipped == 3
    assert story.events[0] == f"{FAULT + 1} anomaly blockwise bits=4 -> none"
    # The loss, which is known one step late, causes no further anomaly.
    anomalies = [event for event in story.events if " anomaly " in event]
    assert {int(event.split()[0]) for event in anomalies} == {FAULT + 1, FAULT + 2, FAULT + 3}
    assert not any("residuals_cleared" in event for event in story.events)
    assert story.settings[FAULT + 1] == "none"
    assert story.settings[-1] == "blockwise bits=4"


def live_steadily(rank: int, job: Job, disturb: Disturb, steps: int, seeds: Sequence[int]) -> list[Story]:
    """Train `steps` steps for each seed. Only the fault makes runs differ."""
    jobs = [replace(job, seed=seed) for seed in seeds]
    return [live_on(steady_data(rank, one)[:steps], rank, one, disturb) for one in jobs]


@cache
def steadily(kind: str, disturb: Disturb, steps: int, seeds: Sequence[int] = SEEDS) -> list[Story]:
    """Return the stories of rank 0. Those of rank 1 differ only in the losses."""
    first, second = run_forks(2, live_steadily, KINDS[kind], disturb, steps, seeds)
    assert [(one.events, one.settings, one.skipped) for one in first] == [
        (one.events, one.settings, one.skipped) for one in second
    ]
    return first


@EVERY
@pytest.mark.parametrize("fault", [poison, pytest.param(poison_nan, marks=pytest.mark.slow)])
def test_a_poisoned_residual_is_cleared(kind: str, fault: Disturb) -> None:
    [story] = steadily(kind, fault, STEPS, SEEDS[:1])
    check_cleared(story)


def check_cleared(story: Story) -> None:
    assert story.events[1].split()[:2] == [str(FAULT + 1), "residuals_cleared"]
    assert story.skipped == 1
    assert story.settings[-1] == "blockwise bits=4"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [poison, poison_nan])
def test_training_with_a_poisoned_residual_ends_as_without(kind: str, fault: Disturb) -> None:
    """A skipped step does not count: training without a fault ends alike after as many updates."""
    stories, undisturbed = steadily(kind, fault, STEPS), steadily(kind, nothing, STEPS - 1)
    assert not any(story.events for story in undisturbed)
    for story in stories:
        check_cleared(story)
    assert Excess.of([late(story) for story in stories], [late(story) for story in undisturbed]).is_below(0.01)


def late(story: Story) -> float:
    """Return a loss in which the rounding of single steps to bf16 averages out."""
    return sum(story.losses[-10:])


def test_a_pipeline_decides_alike_in_all_stages() -> None:
    """There are two stages of two ranks each, and only the last stage knows the loss."""
    job = Job(1, GUARDED, stages=2, steps=24, poison=(16, 1))
    stories = run_forks(4, live_pipeline, job)
    assert len({tuple(events) for events, _ in stories}) == 1
    assert stories[0][0][0] == "17 anomaly grad_norm not finite"
    assert {skipped for _, skipped in stories} == {1}


def live_pipeline(rank: int, job: Job) -> tuple[list[str], int]:
    engine = start(job)
    run(engine, own_data(engine, rank, job))
    return [f"{event.step} {event.kind} {event.reason}" for event in engine.compression.events], engine.skipped_steps


def synchronise(rank: int, job: Job) -> tuple[list[float], list[str], dict[str, list[float]]]:
    """Return squared norms of the residuals after each step, kinds of events, and final weights."""
    engine, norms = start(job), []
    for batch in data(rank, job):
        run(engine, [batch])
        stores = engine.compression.residuals.by_name
        norms.append(sum(float(norm) for name in ("gradients", "means") for norm in stores[name].square_norms()))
    return norms, [event.kind for event in engine.compression.events], weights(engine)


METHODS: list[dict[str, Any]] = [
    {"bits": 4},
    {"method": "topk", "density": 0.05},
    {"method": "powersgd", "rank": 1},
    {"method": "sign", "overrides": [{"parameters": "0", "method": "blockwise", "every": 8}]},
]


@pytest.mark.parametrize("stage", [0, 2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 3))])
@pytest.mark.parametrize("gradients", METHODS, ids=str)
def test_a_full_synchronisation_empties_the_residuals(stage: int, gradients: dict[str, Any]) -> None:
    section = {"gradients": {**gradients, "error_feedback": {"dtype": "fp32"}}, "guard": {"full_sync_every": 3}}
    first, second = run_forks(2, synchronise, Job(stage, section, steps=6))
    for norms, events, _ in (first, second):
        assert events == ["full_sync", "full_sync"]
        assert min(norms[0], norms[1], norms[3], norms[4]) > norms[2] == norms[5] == 0
    assert first[2] == second[2]


def resume(rank: int, directory: str, job: Job) -> tuple[list[float], list[float], list[str], list[str]]:
    """Return losses and events after a checkpoint during a cool-down, when continuing and when resuming."""
    batches, half = data(rank, job), FAULT + 3
    engine = start(job)
    for step, (x, y) in enumerate(batches[:half]):
        train_one(engine, x, y, exploding(engine, rank, step))
    engine.save_checkpoint(directory)
    before = len(engine.compression.events)
    straight = run(engine, batches[half:])
    events = [str(event) for event in engine.compression.events[before:]]
    engine.destroy()
    engine = start(job)
    engine.load_checkpoint(directory)
    again = run(engine, batches[half:])
    return straight, again, events, [str(event) for event in engine.compression.events]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resuming_continues_the_schedule_and_the_guards_memory(stage: int, tmp_path: Path) -> None:
    schedule = {"ramp": {"steps": 40, "stages": [{"bits": 8}, {"bits": 4}]}}
    job = Job(stage, {"gradients": {"bits": 2}, "guard": GUARD, "schedule": schedule}, steps=50)
    for straight, again, events, events_again in run_forks(2, resume, str(tmp_path), job):
        assert straight == again
        assert events == events_again
        assert any("return" in event for event in events)


def fall_behind(rank: int, directory: str, job: Job) -> list[str]:
    engine = start(job)
    for step, (x, y) in enumerate(data(rank, job)):
        if step == 20:
            engine.save_checkpoint(directory)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.3 if step >= 20 and not came_back(engine) else 1e-2
        train_one(engine, x, y, 1.0)
    assert engine.global_steps < job.steps
    return [str(event) for event in engine.compression.events]


def came_back(engine: Any) -> bool:
    return any(event.kind == "checkpoint_rollback" for event in engine.compression.events)


def test_training_that_falls_behind_loads_the_last_checkpoint(tmp_path: Path) -> None:
    rollback = {"behind": 0.2, "patience": 4, "checkpoint": True}
    guard = {"rollback": rollback, "window": 8, "loss_spike": 1e6, "skip_steps": False, "exploding": 1e9}
    first, second = run_forks(
        2, fall_behind, str(tmp_path), Job(2, {"gradients": {"bits": 8}, "guard": guard}, steps=60)
    )
    assert first == second
    assert [event.split()[2] for event in first][:2] == ["rollback:", "checkpoint_rollback:"]


def return_without(rank: int, directory: str, job: Job, deleted: Sequence[str]) -> tuple[int, str]:
    """Save two checkpoints, delete some, and roll back. Return the step after that, and the warning or the error."""
    engine = start(job)
    for x, y in data(rank, job):
        train_one(engine, x, y, 1.0)
        engine.save_checkpoint(directory)
    for tag in deleted if rank == 0 else ():
        shutil.rmtree(Path(directory) / tag)
    dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load_last(engine)
        except StateError as error:
            return engine.global_steps, str(error)
    return engine.global_steps, "".join(str(one.message) for one in seen if one.category is CompressWarning)


@pytest.mark.parametrize(("deleted", "step"), [(["global_step2"], 1), (["global_step1", "global_step2"], 2)])
def test_checkpoints_that_were_deleted_are_passed_over(deleted: list[str], step: int, tmp_path: Path) -> None:
    """All ranks load the one before, or all name the reason."""
    job = Job(1, {"gradients": {"bits": 8}, "guard": GUARD}, steps=2)
    for reached, text in run_forks(2, return_without, str(tmp_path), job, deleted):
        assert reached == step
        assert f"/deepspeed_compress/guard/rollback/checkpoint: {tmp_path / deleted[0]}" in text
        assert text.endswith("to the checkpoint before") == (step == 1)


def hot(engine: Any, rank: int, step: int) -> float:
    """Multiply the learning rate by 100 for 20 steps."""
    for group in engine.optimizer.param_groups:
        group["lr"] = 1.0 if FAULT <= step < FAULT + 20 else 1e-2
    return 1.0


@pytest.mark.parametrize("kind", ["zero 0", "zero 2", "zero 3"])
def test_training_survives_a_learning_rate_that_explodes(kind: str) -> None:
    story = both(KINDS[kind], hot)
    assert any(" anomaly " in event for event in story.events)


def learn(rank: int, disturb: Disturb) -> tuple[float, list[str]]:
    """Train a small GPT on predictable sequences. Return the final held-out loss and the events."""
    engine = language.start(GUARDED, width=128)
    for step in range(200):
        language.train(engine, step, 4, disturb(engine, rank, step))
    return language.evaluate(engine), [str(event) for event in engine.compression.events]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_language_model_ends_within_one_per_cent_of_undisturbed_training() -> None:
    ends = {}
    for fault in (nothing, poison, poison_nan, not_a_number):
        (loss, events), (_, same) = run_forks(2, learn, fault, timeout=600)
        assert events == same
        assert bool(events) == (fault is not nothing)
        ends[fault.__name__] = loss
    print(ends)
    for loss in ends.values():
        assert loss == pytest.approx(ends["nothing"], rel=0.01)
