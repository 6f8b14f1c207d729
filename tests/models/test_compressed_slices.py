"""Compression with tensor parallelism: replicated parameters are sent uncompressed, and stay bit-identical."""

from dataclasses import dataclass
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.utils import is_model_parallel_parameter

from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout
from tests.models.families import write_config
from tests.models.runs import Run, finish, start, train
from tests.support.forks import run_forks

pytestmark = pytest.mark.sampled(4)


@dataclass(frozen=True)
class Outcome:
    """Losses, replicated parameters by name, and names of the parameters that are sent uncompressed."""

    losses: list[float]
    replicated: dict[str, list[float]]
    uncompressed: set[str]


def train_all(rank: int, *runs: Run) -> list[Outcome]:
    return [train_one(run) for run in runs]


def train_one(run: Run) -> Outcome:
    engine = start(run)
    losses, replicated = train(engine, run), {}
    for name, parameter in engine.module.named_parameters():
        if not is_model_parallel_parameter(parameter):
            with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                replicated[name] = parameter.detach().flatten().tolist()
    reducer = engine.compression.gradients.reducer
    uncompressed = {name for name in engine.param_names.values() if name not in reducer.messages.channel_of}
    finish(engine)
    return Outcome(losses, replicated, uncompressed)


@pytest.mark.parametrize("stage", range(4))
def test_replicated_parameters_stay_equal(stage: int, tmp_path: Path) -> None:
    parallelism = {"zero_stage": stage, "tensor": 2}
    section = {SECTION: {"parallelism": parallelism, "gradients": {"bits": 4, "block_size": 32}}}
    models = [write_config(tmp_path / family, family) for family in ("gpt2", "qwen3")]
    runs = [Run(model, Layout(tensor=2), stage, steps=8, data=2, extra=section) for model in models]
    for ranks in zip(*run_forks(4, train_all, *runs), strict=True):
        assert ranks[0].replicated
        assert ranks[0].uncompressed == set(ranks[0].replicated)
        assert all(rank.replicated == ranks[0].replicated for rank in ranks)
        # The same four batches are trained twice.
        assert all(sum(rank.losses[4:]) < sum(rank.losses[:4]) - 0.3 for rank in ranks)
