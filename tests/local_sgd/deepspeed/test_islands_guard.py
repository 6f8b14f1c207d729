"""The guard inside islands: each island decides alike on all of its ranks, and the others neither act nor wait."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.tools.run_directory import read_directory
from tests.support.faults import FAULT, GUARD, Disturb, exploding, live, not_a_number, poison, train_one
from tests.support.forks import run_forks
from tests.support.island_jobs import run_apart
from tests.support.jobs import Job, data, run, start, train, weights
from tests.support.tensor_islands import AUTO_TP, start_tensor, take_steps

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


def of_rank_3(engine: Any, rank: int, step: int) -> float:
    return not_a_number(engine, rank - 2, step)


def test_events_of_all_islands_are_read_with_the_run(tmp_path: Path) -> None:
    job = Job(1, section(monitor={"announce": False, "path": str(tmp_path), "every": 1}), steps=FAULT + 6)
    *_, last = run_forks(4, live, job, of_rank_3)
    assert guard_events(tmp_path / "island_0001") == last.events != []
    found = read_directory(tmp_path)
    assert [(event["island"], event["step"]) for event in found.events or ()] == [
        (1, int(text.split()[0])) for text in last.events
    ]
    assert [line["step"] for line in found.statistics] == list(range(1, FAULT + 7))


def test_islands_without_a_saved_state_decide_as_the_first_ones(tmp_path: Path) -> None:
    job = Job(1, section(), steps=FAULT + 14)
    run_forks(2, save, job, str(tmp_path))
    ranks = [events for _, events, _ in run_forks(4, resume, job, str(tmp_path))]
    assert len(ranks[0]) == 2
    assert ranks == [ranks[0]] * 4


def live_elastic(rank: int, job: Job) -> tuple[list[str], list[tuple[int, dict[str, list[float]]]]]:
    """Return events of the guard, and weights after every exchange. The loss of rank 3 is NaN in one step."""
    engine, seen = start(job), []
    islands = engine.compression.islands
    for step, (x, y) in enumerate(data(10 * islands.number + rank % 2, job)):
        train_one(engine, x, y, math.nan if (rank, step) == (3, 2) else 1.0)
        if len(islands.history) > len(seen):
            seen.append((islands.exchange.version, weights(engine)))
        if len(seen) == 3:
            break
    events = [f"{event.step} {event.kind}" for event in engine.compression.events if event.kind == "anomaly"]
    engine.destroy()
    return events, seen


def test_elastic_islands_decide_independently() -> None:
    guarded = {key: value for key, value in section().items() if key != "islands"}
    first, second, third, fourth = run_apart(2, live_elastic, Job(1, guarded, steps=40), size=2)
    assert (first[0], second[0]) == ([], [])
    assert third[0] == fourth[0] != []
    assert first[1] == second[1] == third[1] == fourth[1]


def live_split(rank: int, job: Job) -> tuple[list[str], int, dict[str, list[float]]]:
    """Train with pairs of ranks that share layers. Only the loss of rank 3 is NaN, in one step."""
    engine = start_tensor(job)
    forward = engine.forward

    def spoilt(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        output.loss = output.loss * (math.nan if (rank, engine.global_steps) == (3, 2) else 1.0)
        return output

    engine.forward = spoilt
    take_steps(engine, rank, job)
    events = [f"{event.step} {event.kind}" for event in engine.compression.events]
    return events, engine.skipped_steps, weights(engine)


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_share_layers_decide_alike(stage: int) -> None:
    islands = {"size": 1, "sync_every": 3, "exchange": {"method": "none"}}
    job = Job(stage, section(islands=islands), extra=AUTO_TP, steps=6)
    first, second, third, fourth = run_forks(4, live_split, job, timeout=400)
    assert (first[:2], second[:2]) == (([], 0), ([], 0))
    assert third[:2] == fourth[:2] != ([], 0)
    assert third[1] == 1
    assert (first[2], second[2]) == (third[2], fourth[2])
