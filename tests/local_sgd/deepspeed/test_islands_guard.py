"""The guard inside islands: each island decides alike on all of its ranks, and the others neither act nor wait."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import FAULT, GUARD, Disturb, exploding, live, not_a_number, poison, train_one
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, train, weights

pytestmark = pytest.mark.sampled(6)

STEPS = 60
"""Number of steps. The last one ends with an exchange."""


def section(**changes: Any) -> Mapping[str, Any]:
    islands = {"size": 2, "sync_every": 4, "exchange": {"method": "blockwise", "bits": 4}}
    return {"gradients": {"bits": 4}, "guard": GUARD, "monitor": {"announce": False}, "islands": islands, **changes}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_a_fault_a_guard_changes_no_bit(stage: int) -> None:
    job = Job(stage, section(), steps=22)
    for with_guard, without in run_forks(4, train, job, replace(job, section=section(guard=None))):
        assert with_guard == without


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_island_without_compression_equals_deepspeed(stage: int) -> None:
    alone = Job(stage, steps=22)
    island = {"size": 2, "sync_every": 1, "exchange": {"method": "none"}}
    one = replace(alone, section=section(gradients={"method": "none"}, islands=island))
    for plain, ours in run_forks(2, train, alone, one):
        assert ours == plain


def guard_events(directory: Path) -> list[str]:
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [f"{event['step']} {event['kind']} {event['before']} -> {event['after']}" for event in events]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("fault", "second"), [(not_a_number, "return"), (poison, "residuals_cleared")])
def test_only_the_island_with_the_fault_reacts(stage: int, fault: Disturb, second: str, tmp_path: Path) -> None:
    """Rank 1 has the fault. The island that reacts writes its events into its own directory."""
    monitor = {"announce": False, "path": str(tmp_path)}
    first, same, third, fourth = run_forks(4, live, Job(stage, section(monitor=monitor), steps=STEPS), fault)
    assert (first.events, first.settings, first.skipped) == (same.events, same.settings, same.skipped)
    assert first.events[0] == f"{FAULT + 1} anomaly blockwise bits=4 -> none"
    assert second in [event.split()[1] for event in first.events]
    assert first.skipped == 1
    assert first.settings[-1] == "blockwise bits=4"
    for other in (third, fourth):
        assert (other.events, other.skipped, set(other.settings)) == ([], 0, {"blockwise bits=4"})
    # The islands exchanged after the last step.
    assert len({story.final for story in (first, same, third, fourth)}) == 1
    assert math.isfinite(first.final)
    assert guard_events(tmp_path) == first.events
    assert not (tmp_path / "island_0001").exists()


@pytest.mark.parametrize("stage", [0, 1])
def test_an_island_of_one_rank_skips_steps(stage: int) -> None:
    islands = {"size": 1, "sync_every": 4, "exchange": {"method": "none"}}
    first, second = run_forks(2, live, Job(stage, section(islands=islands), steps=FAULT + 6), not_a_number)
    assert (first.events, first.skipped, second.skipped) == ([], 0, 1)
    assert second.events[0].startswith(f"{FAULT + 1} anomaly")
    assert math.isfinite(second.final)


Told = tuple[list[float], list[str], dict[str, list[float]]]
"""Losses, events and weights at the end of a run."""


def rest(engine: Any, batches: Any) -> Told:
    before = len(engine.compression.events)
    losses = run(engine, batches)
    return losses, [str(event) for event in engine.compression.events[before:]], weights(engine)


def save(rank: int, job: Job, directory: str) -> Told:
    """Save a checkpoint while settings recover. Rank 1 has the fault."""
    engine, half = start(job), FAULT + 3
    batches = data(rank, job)
    for step, (x, y) in enumerate(batches[:half]):
        train_one(engine, x, y, exploding(engine, rank, step))
    engine.save_checkpoint(directory)
    return rest(engine, batches[half:])


def resume(rank: int, job: Job, directory: str) -> Told:
    engine = start(job)
    engine.load_checkpoint(directory)
    return rest(engine, data(rank, job)[FAULT + 3 :])


@pytest.mark.parametrize("stage", [1, 3])
def test_each_island_of_a_resumed_run_decides_as_the_saved_one(stage: int, tmp_path: Path) -> None:
    job = Job(stage, section(), steps=FAULT + 14)
    straight = run_forks(4, save, job, str(tmp_path))
    assert run_forks(4, resume, job, str(tmp_path)) == straight
    assert [len(events) for _, events, _ in straight] == [2, 2, 0, 0]
    assert all(" return: " in event for event in straight[0][1])
