"""Elastic islands whose ranks share layers (AutoTP)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch.utils.data import TensorDataset

from tests.support.island_jobs import SGD, Exchanges, run_apart, watch_exchanges
from tests.support.jobs import Job
from tests.support.resuming import save_and_resume
from tests.support.tensor_islands import AUTO_TP, TENSOR, start_tensor, take_steps

SAMPLED = pytest.mark.sampled(4)
PLAIN: Mapping[str, Any] = {"exchange": {"method": "none"}}


def apart(rank: int, job: Job) -> tuple[Exchanges, list[str]]:
    """Train an island of two ranks until three exchanges are over. Return them, and the names of replicated weights."""
    engine = start_tensor(job)
    named, seen = engine.module.named_parameters(), watch_exchanges(engine)
    replicated = [name for name, one in named if not is_model_parallel_parameter(one)]
    # Islands have other data; ranks that share layers have the same.
    data = TENSOR * (engine.compression.islands.number % 2)
    for step in range(job.steps):
        if len(seen.after) < 3:
            take_steps(engine, data, job, step, step + 1)
    engine.destroy()
    return seen, replicated


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exchange_is_the_mean_of_the_islands(stage: int) -> None:
    """Uncompressed, and between ranks that hold the same parts of layers."""
    job = Job(stage, extra={**AUTO_TP, **SGD}, steps=60)
    first, second, third, fourth = (seen for seen, _ in run_apart(2, apart, job, size=TENSOR, **PLAIN))
    first.check_means(third)
    second.check_means(fourth)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_weights_stay_equal_with_four_bits(stage: int) -> None:
    """Ranks that share layers end every exchange with the same norms, and islands with the same weights."""
    job = Job(stage, extra=AUTO_TP, steps=60)
    (first, replicated), (second, _), (third, _), (fourth, _) = run_apart(2, apart, job, size=TENSOR)
    assert replicated
    for version in first.after.keys() & third.after.keys():
        assert first.after[version] == third.after[version]
        assert second.after[version] == fourth.after[version]
        for name in replicated:
            assert first.after[version][name] == second.after[version][name]


def sampled(rank: int, job: Job) -> list[int]:
    """Return the indices of a dataset of 24 samples that this rank of an island reads."""
    engine = start_tensor(job)
    read = sorted(engine.deepspeed_io(TensorDataset(torch.arange(24))).data_sampler)
    engine.destroy()
    return read


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_share_layers_read_the_same_data(stage: int) -> None:
    job = Job(stage, extra=AUTO_TP)
    first, second, third, fourth = run_apart(1, sampled, job, size=4, minimum=1)
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(24))


@pytest.mark.slow
def test_an_island_that_is_resumed_goes_on_as_before(tmp_path: Path) -> None:
    """Two ranks share layers, and no other island takes part, so exchanges change nothing."""
    job, options = Job(1, extra=AUTO_TP, steps=9), {"size": TENSOR, "minimum": 1, **PLAIN}
    for (straight, _), (resumed, _) in run_apart(
        1, save_and_resume, job, str(tmp_path), 6, start_tensor, take_steps, **options
    ):
        assert {name: pytest.approx(values, abs=1e-6) for name, values in straight.items()} == resumed
