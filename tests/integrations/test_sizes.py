"""Trainer resumes on another number of ranks: the same steps on the same data, and the learning rate that follows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_checkpoints import SAVING, stop_at
from tests.integrations.trainers import Job, train
from tests.support.forks import run_forks

NONE: dict[str, Any] = {"gradients": {"method": "none"}}
GLOBAL = 4


def of(job: Job, ranks: int) -> Job:
    """The same sequences in a step."""
    return replace(job, args={**job.args, "gradient_accumulation_steps": GLOBAL // ranks})


@pytest.mark.parametrize(("stage", "before", "after"), [(2, 4, 2), (2, 1, 2), (3, 2, 4), (0, 2, 1)])
def test_resuming_on_another_number_of_ranks(stage: int, before: int, after: int, tmp_path: Path) -> None:
    job = Job(str(tmp_path), stage, NONE, {**SAVING, "max_steps": 6})
    [whole, *_] = run_forks(before, train, of(job, before))
    stop_at(job.directory, 2)
    for resumed in run_forks(after, train, of(replace(job, resume=True), after)):
        assert resumed[0].of("loss") == pytest.approx(whole[0].of("loss"), rel=1e-4)
        assert resumed[0].of("learning_rate") == whole[0].of("learning_rate")
        for name, values in whole[0].parameters.items():
            assert resumed[0].parameters[name] == pytest.approx(values, abs=2e-3), name
