"""AutoTP with compression: parameters that tensor-parallel ranks share stay bit-identical."""

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job
from tests.support.tensor_islands import start_tensor, take_steps


def train_llama(rank: int, stage: int) -> tuple[dict[str, list[float]], list[str], int]:
    """Return the parameters after three steps, the names of the uncompressed ones, and the number of parameters."""
    section = {"parallelism": {"tensor": 2}, "gradients": {"bits": 4, "block_size": 32}}
    job = Job(stage=stage, section=section, steps=3)
    engine = start_tensor(job)
    reducer = engine.compression.gradients.reducer
    take_steps(engine, rank, job)
    raw = [name for name in engine.param_names.values() if name not in reducer.messages.channel_of]
    found = {name: value.detach().flatten().tolist() for name, value in engine.module.named_parameters()}
    return found, raw, len(engine.param_names)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicated_parameters_stay_equal(stage):
    results = run_forks(4, train_llama, stage, shared_memory=True)
    parameters, raw, count = results[0]
    assert any("norm" in name for name in raw)
    assert 0 < len(raw) < count
    for name in raw:
        assert all(other[0][name] == parameters[name] for other in results), name
