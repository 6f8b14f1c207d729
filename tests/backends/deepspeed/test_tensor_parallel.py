"""AutoTP with compression: parameters that tensor-parallel ranks share stay bit-identical."""

from collections.abc import Mapping
from typing import Any

import pytest

from deepspeed_compress.backends.deepspeed.engine_facts import shared_parameters
from tests.support.forks import run_forks
from tests.support.jobs import Job
from tests.support.methods import NONE
from tests.support.tensor_islands import start_tensor, take_steps

INT4 = {"bits": 4, "block_size": 32}
Outcome = tuple[dict[str, list[float]], list[str], list[str]]
"""The parameters after three steps, and the names of those that ranks share, and of all that are sent uncompressed."""


def train_llama(rank: int, stage: int, section: Mapping[str, Any]) -> Outcome:
    job = Job(stage, {"parallelism": {"tensor": 2}, **section}, steps=3)
    engine = start_tensor(job)
    take_steps(engine, rank, job)
    # With exact gradients, there is no second list to compare with.
    shared = raw = shared_parameters(engine)
    if engine.compression.reductions is not None:
        reducer = engine.compression.gradients.reducer
        raw = [name for name in engine.param_names.values() if name not in reducer.messages.channel_of]
    return {name: value.detach().flatten().tolist() for name, value in engine.module.named_parameters()}, shared, raw


def check_shared(results: list[Outcome]) -> None:
    parameters, shared, raw = results[0]
    assert raw == shared
    assert any("norm" in name for name in shared)
    assert len(shared) < len(parameters)
    for name in shared:
        assert all(other[0][name] == parameters[name] for other in results), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicated_parameters_stay_equal(stage: int) -> None:
    check_shared(run_forks(4, train_llama, stage, {"gradients": INT4}, shared_memory=True))


def test_replicated_parameters_stay_equal_with_compressed_weights() -> None:
    """Ranks 0 and 1 share layers. Parameters that both hold completely are sent exactly."""
    results = run_forks(4, train_llama, 1, {**NONE, "weights": INT4}, shared_memory=True)
    check_shared(results)
    assert results[0][0] == results[2][0]
    [plain, *_] = run_forks(4, train_llama, 1, NONE, shared_memory=True)
    assert results[0][0] != plain[0]
