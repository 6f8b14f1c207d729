"""Compression beside tensor parallelism: what all slices hold goes uncompressed, and stays equal to the bit."""

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


@dataclass(frozen=True)
class Seen:
    """Losses; the parameters that all slices hold, by name; the names of those that went uncompressed."""

    losses: list[float]
    shared: dict[str, list[float]]
    raw: set[str]


def train_all(rank: int, *runs: Run) -> list[Seen]:
    return [train_one(run) for run in runs]


def train_one(run: Run) -> Seen:
    engine = start(run)
    losses, shared = train(engine, run), {}
    for name, parameter in engine.module.named_parameters():
        if not is_model_parallel_parameter(parameter):
            with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                shared[name] = parameter.detach().flatten().tolist()
    reducer = engine.compression.reducer
    raw = {name for name in engine.param_names.values() if name not in reducer.messages.channel_of}
    finish(engine)
    return Seen(losses, shared, raw)


@pytest.mark.parametrize("stage", range(4))
def test_what_slices_share_stays_equal(stage: int, tmp_path: Path) -> None:
    parallelism = {"zero_stage": stage, "tensor": 2}
    section = {SECTION: {"parallelism": parallelism, "gradients": {"bits": 4, "block_size": 32}}}
    models = [write_config(tmp_path / family, family) for family in ("gpt2", "qwen3")]
    runs = [Run(model, Layout(tensor=2), stage, steps=8, data=2, extra=section) for model in models]
    for seen in zip(*run_forks(4, train_all, *runs), strict=True):
        assert seen[0].shared
        assert seen[0].raw == set(seen[0].shared)
        assert all(rank.shared == seen[0].shared for rank in seen)
        # The same four batches come twice.
        assert all(sum(rank.losses[4:]) < sum(rank.losses[:4]) - 0.3 for rank in seen)
