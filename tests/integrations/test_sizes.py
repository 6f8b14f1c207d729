"""Trainer resumes on another number of ranks, with the same steps, data and learning rates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainers import SAVING, Job, keep_checkpoint, train
from tests.support.forks import run_forks

pytestmark = pytest.mark.sampled(4)

NONE: dict[str, Any] = {"gradients": {"method": "none"}}
MICRO_BATCHES = 4
"""Micro-batches of all ranks in a step."""


def on_ranks(job: Job, ranks: int) -> Job:
    """Return `job` with the gradient accumulation that keeps the batch on `ranks` ranks."""
    return replace(job, args={**job.args, "gradient_accumulation_steps": MICRO_BATCHES // ranks})


@pytest.mark.parametrize(("stage", "before", "after"), [(2, 4, 2), (2, 1, 2), (3, 2, 4), (0, 2, 1)])
def test_resuming_on_another_number_of_ranks_continues_the_run(
    stage: int, before: int, after: int, tmp_path: Path
) -> None:
    job = Job(str(tmp_path), stage, NONE, {**SAVING, "max_steps": 6})
    [whole, *_] = run_forks(before, train, on_ranks(job, before))
    keep_checkpoint(job.directory, 2)
    for resumed in run_forks(after, train, on_ranks(replace(job, resume=True), after)):
        assert resumed[0].of("loss") == pytest.approx(whole[0].of("loss"), rel=1e-4)
        assert resumed[0].of("learning_rate") == whole[0].of("learning_rate")
        for name, values in whole[0].parameters.items():
            assert resumed[0].parameters[name] == pytest.approx(values, abs=2e-3), name
