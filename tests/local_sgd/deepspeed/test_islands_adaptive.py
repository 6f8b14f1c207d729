"""Adaptation inside islands: each island measures and chooses for itself, without an effect on the others."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import deepspeed_compress.session.probing as probing
from tests.support.faults import train_one
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, warned, weights

pytestmark = pytest.mark.sampled(4)

STEPS = 24
LATE = 1
"""Number of steps done when the island of rank 2 skips one that it would have measured."""


def section(**changes: Any) -> Mapping[str, Any]:
    islands = {"size": 2, "sync_every": 4, "exchange": {"method": "none"}}
    adaptive = {"candidates": [{"bits": 4}], "probe_every": 6}
    return {
        "gradients": {"bits": 8},
        "adaptive": adaptive,
        "monitor": {"announce": False, "every": 5},
        "islands": islands,
        **changes,
    }


@contextmanager
def measured_links(rank: int) -> Iterator[None]:
    """Replace measurements of links: free in the first island, slow in the second one.

    In the second island a byte takes 10 ms, and the whole time is waited for, so that other load on the machine does
    not matter.
    """
    measure = probing.Prober.measure

    def seconds(group: Any, device: Any, sizes: Sequence[int]) -> list[float]:
        assert group.size() == 2
        return [size * (1e-2 if rank >= 2 else 1e-12) for size in sizes]

    def waiting(self: Any, group: Any, waited: float, step: float, traffic: Any) -> Any:
        return measure(self, group, 1e3, step, traffic)

    with mock.patch.object(probing, "link_seconds", seconds), mock.patch.object(probing.Prober, "measure", waiting):
        yield


def choose(rank: int, job: Job) -> tuple[list[str], list[str], dict[str, list[float]]]:
    """Return settings by step, kinds of events, and final weights. Islands measure in different steps."""
    engine, settings = start(job), []
    with measured_links(rank):
        for step, (x, y) in enumerate(data(rank, job)):
            train_one(engine, x, y, math.nan if (rank, step) == (2, LATE) else 1.0)
            settings.append(engine.compression.settings)
    return settings, [f"{event.step} {event.kind}" for event in engine.compression.events], weights(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_islands_choose_by_their_own_links_and_all_finish(stage: int) -> None:
    job = Job(stage, section(guard={"on_anomaly": "report"}), steps=STEPS)
    first, second, third, fourth = run_forks(4, choose, job)
    assert first[:2] == second[:2]
    assert third[:2] == fourth[:2]
    assert set(first[0][LATE + 1 :]) == {"none"}
    assert {text.split()[0] for text in third[1] if "adapt" in text}.isdisjoint(first[1][0].split())
    assert third[0][-1] == "blockwise bits=4"
    assert first[2] == second[2] == third[2] == fourth[2]


DAY = 86_400.0


class LateClock:
    """Clock that runs as `time.perf_counter` does, `late` seconds ahead."""

    def __init__(self) -> None:
        self.late, self._read = 0.0, time.perf_counter

    def __call__(self) -> float:
        return self._read() + self.late


def measured(rank: int, job: Job) -> list[float]:
    """Return the seconds for which measured steps waited. The exchange before the second one seems to take a day."""
    engine, waited, clock = start(job), [], LateClock()
    meter, exchange = engine.compression.meter, engine.compression.islands
    measure, ended = probing.Prober.measure, exchange.step_ended

    def slowly(step: int) -> None:
        ended(step)
        with meter.phase("communicate", engine.device):
            clock.late += DAY if step == 8 else 0.0

    def recorded(self: Any, group: Any, seconds: float, step: float, traffic: Any) -> Any:
        waited.append(seconds)
        return measure(self, group, seconds, step, traffic)

    exchange.step_ended = slowly
    with (
        mock.patch.object(probing.Prober, "measure", recorded),
        mock.patch("deepspeed_compress.monitor.meter.time.perf_counter", clock),
    ):
        run(engine, data(rank, job))
    return waited


def test_the_time_of_an_exchange_is_not_counted_as_gradient_time() -> None:
    for waited in run_forks(2, measured, Job(1, section(), steps=12)):
        assert len(waited) == 2
        assert 0 <= min(waited) <= max(waited) < DAY


def saved(rank: int, job: Job, directory: str) -> dict[str, Any]:
    engine = start(job)
    with measured_links(rank):
        run(engine, data(rank, job))
        engine.save_checkpoint(directory)
    return engine.compression.decisions()["policy"]


def loaded(rank: int, job: Job, directory: str) -> dict[str, Any]:
    engine = start(job)
    engine.load_checkpoint(directory)
    return engine.compression.decisions()["policy"]


def test_choices_are_saved_and_loaded_by_island(tmp_path: Path) -> None:
    job = Job(1, section(), steps=12)
    decided = run_forks(4, saved, job, str(tmp_path))
    assert decided[0] == decided[1]
    assert decided[2] == decided[3]
    assert decided[0]["adaptation"]["choice"] != decided[2]["adaptation"]["choice"]
    assert run_forks(4, loaded, job, str(tmp_path)) == decided


def test_an_island_of_one_rank_has_nothing_to_choose() -> None:
    alone = {"size": 1}
    for texts in run_forks(2, warned, Job(1, section(islands=alone))):
        assert any("/adaptive: has no effect in islands of size 1" in text for text in texts)


def host_of_one(rank: int, job: Job) -> list[str]:
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="1", LOCAL_SIZE="1"):
        return warned(rank, job)


def test_hosts_of_one_rank_have_nothing_to_choose() -> None:
    for texts in run_forks(2, host_of_one, Job(1, section(islands={"by_host": True}))):
        assert any("/adaptive: has no effect, because each host has one data-parallel rank" in text for text in texts)
