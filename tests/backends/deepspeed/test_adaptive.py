"""Adaptive settings that follow the network and the gradients, on ranks that decide alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, own_data, run, start, weights
from tests.support.methods import FP16

pytestmark = pytest.mark.sampled(4)

ADAPTIVE = {"probe_every": 4, "max_error": 0.3, "candidates": [{"bits": 8}, {"bits": 4}, {"bits": 2}]}


def follow(rank: int, job: Job, slow_from: int | None = None) -> tuple[list[str], list[str], dict[str, list[float]]]:
    """Return the settings of each step, events and weights.

    The link becomes slow after step `slow_from`; it is measured if that is None.
    """
    engine, settings = start(job), []
    prober = engine.compression.prober
    measure = prober.measure

    def measured(*args: Any) -> Any:
        seen = measure(*args)
        link = replace(seen.link, seconds_per_byte=1e-3 if engine.global_steps > slow_from else 1e-15)
        return replace(seen, link=link, codec_seconds=(1e-6,) * len(seen.codec_seconds), step=0.01, waited=9.0)

    if slow_from is not None:
        prober.measure = measured
    for batch in own_data(engine, rank, job):
        settings.append(engine.compression.settings)
        run(engine, [batch])
    return settings, [str(event) for event in engine.compression.events], weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_compressed_until_it_pays(stage: int) -> None:
    section = {"gradients": {"bits": 8}, "adaptive": ADAPTIVE}
    first, second = run_forks(2, follow, Job(stage, section, steps=14), 6)
    assert first[:2] == second[:2]
    settings, events, _ = first
    assert settings[:2] == ["blockwise bits=8"] * 2
    assert settings[2:6] == ["none"] * 4
    assert settings[-1] == "blockwise bits=4"
    assert [event.split()[2] for event in events] == ["adapt:", "adapt:"]


def test_stages_of_a_pipeline_choose_alike() -> None:
    job = Job(1, {"gradients": {"bits": 8}, "adaptive": ADAPTIVE}, stages=2, steps=10)
    found = run_forks(4, follow, job, 4)
    assert len({tuple(settings) for settings, _, _ in found}) == 1
    assert found[0][0][-1] == "blockwise bits=4"


def test_groups_of_parameters_get_settings_of_their_own() -> None:
    """With a small allowed error, the bias of one layer is worth more bits than those of the others."""
    adaptive = {**ADAPTIVE, "groups": ["^0", "^2"], "max_error": 0.15}
    section = {"gradients": {"bits": 2, "block_size": 64}, "adaptive": adaptive}
    first, second = run_forks(2, follow, Job(2, section, steps=12), 0)
    assert first == second
    assert "blockwise" in first[0][-1]


def resume(rank: int, directory: str, job: Job) -> tuple[Any, Any]:
    batches, half = data(rank, job), 6
    engine = start(job)
    run(engine, batches[:half])
    engine.save_checkpoint(directory)
    choice = engine.compression.decisions()["policy"]["adaptation"]
    engine.destroy()
    engine = start(job)
    engine.load_checkpoint(directory)
    return choice, engine.compression.decisions()["policy"]["adaptation"]


def test_a_resumed_run_has_the_choice_of_the_one_that_saved(tmp_path: Path) -> None:
    section = {"gradients": {"bits": 8}, "adaptive": {**ADAPTIVE, "probe_every": 50}}
    for choice, again in run_forks(2, resume, str(tmp_path), Job(2, section, steps=6)):
        assert again["choice"] == choice["choice"]
        assert again["next"] == choice["next"]


def overflow(rank: int, job: Job) -> tuple[list[str], list[int], int]:
    """Return settings and the step of the next measurement after each step, and the skipped steps.

    The second step overflows.
    """
    engine, settings, due = start(job), [], []
    for step, (x, y) in enumerate(data(rank, job)):
        run(engine, [(x * 3e4 if (step, rank) == (1, 1) else x, y)])
        settings.append(engine.compression.settings)
        due.append(engine.compression.decisions()["policy"]["adaptation"]["next"])
    return settings, due, engine.skipped_steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_is_not_measured_and_the_next_one_is(stage: int) -> None:
    section = {"gradients": {"bits": 8}, "adaptive": {**ADAPTIVE, "probe_every": 50}}
    first, second = run_forks(2, overflow, Job(stage, section, extra=FP16, steps=4))
    assert first == second
    settings, due, skipped = first
    assert skipped == 1
    assert settings[1] == "blockwise bits=8"
    assert due == [1, 1, 11, 11]


def test_one_rank_sends_nothing_so_nothing_is_compressed() -> None:
    section = {"gradients": {"bits": 8}, "adaptive": ADAPTIVE}
    [(settings, events, _)] = run_forks(1, follow, Job(2, section, steps=8))
    assert settings[-1] == "none"
    assert [event.split()[2] for event in events] == ["adapt:"]
