"""A checkpoint holds the state at the time of the call, whatever the program does next."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.utils import (
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from deepspeed_compress.checkpointing.snapshot import Call, Snapshot
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, run, start, train_on

pytestmark = pytest.mark.sampled(4)

SECTION = {"gradients": {"bits": 4, "block_size": 32}}


def change_weights(engine: Any) -> None:
    """Change weights in place, as clamping or swapping in an average does."""
    for parameter in engine.module.parameters():
        getattr(parameter, "ds_tensor", parameter).data.mul_(0.5)


def set_masters(engine: Any) -> None:
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            safe_set_local_fp32_param(parameter, torch.full(parameter.ds_tensor.shape, 0.1))
        else:
            safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 0.1))


def set_states(engine: Any) -> None:
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            safe_set_local_optimizer_state(parameter, torch.full(parameter.ds_tensor.shape, 0.1), "exp_avg")
        else:
            safe_set_full_optimizer_state(parameter, torch.full(parameter.shape, 0.1), "exp_avg")


def reset_states(engine: Any) -> None:
    """Reset momentum, as programs that merge low-rank updates do."""
    for state in base(engine).state.values():
        state["exp_avg"].zero_()


def write_masters(engine: Any) -> None:
    """Apply weight decay to the master weights."""
    for group in base(engine).param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(0.9)


def base(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


CHANGES: tuple[Callable[[Any], None], ...] = (change_weights, set_masters, set_states, reset_states, write_masters)


def save_and_change(rank: int, directory: str, stage: int) -> None:
    """Save with this package, whose copies are delayed here, and with DeepSpeed."""
    finish = Snapshot.finish

    def late(self: Snapshot) -> None:
        time.sleep(0.2)
        finish(self)

    with patch.object(Snapshot, "finish", late):
        for name, more in (("ours", {"checkpointing": {}}), ("deepspeed", {})):
            one = Job(stage, {**SECTION, **more}, steps=len(CHANGES) + 1)
            engine, (first, *batches) = start(one), data(rank, one)
            run(engine, [first])
            # Under ZeRO 3, the padding of a part holds whatever was in memory.
            set_masters(engine)
            for change, batch in zip(CHANGES, batches, strict=True):
                engine.save_checkpoint(f"{directory}/{name}", tag=change.__name__)
                change(engine)
                run(engine, [batch])
            engine.destroy()


def tensors(found: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors in a file by their place in it."""
    if isinstance(found, torch.Tensor):
        return {name: found}
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list | tuple) else ()
    return {key: value for place, one in items for key, value in tensors(one, f"{name}/{place}").items()}


@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_holds_the_state_at_the_call_even_if_the_program_changes_it(tmp_path: Path, stage: int) -> None:
    run_forks(2, save_and_change, str(tmp_path), stage)
    files = [file.relative_to(tmp_path / "deepspeed") for file in (tmp_path / "deepspeed").rglob("*_states.pt")]
    assert len(files) == len(CHANGES) * {0: 1, 1: 3, 2: 3, 3: 4}[stage]
    for file in files:
        ours, expected = (
            tensors(torch.load(tmp_path / name / file, weights_only=False)) for name in ("ours", "deepspeed")
        )
        assert ours.keys() == expected.keys()
        assert {name for name in ours if not torch.equal(ours[name], expected[name])} == set()
        assert all(ours[name].requires_grad == expected[name].requires_grad for name in ours)


def sizes_of_calls(rank: int, directory: str, stage: int) -> tuple[int, ...]:
    """Return the number of bytes pickled in the call, for a model whose tensors take 400 kB."""
    kept: list[bytes] = []
    add = Snapshot.add

    def noted(self: Snapshot, call: Call) -> None:
        add(self, call)
        kept.append(self._calls[-1])

    config = Job(stage, {**SECTION, "checkpointing": {}}).config()
    engine = make_engine(nn.Linear(300, 300), config)
    train_on(engine, engine(torch.ones(1, 300)).sum())
    with patch.object(Snapshot, "add", noted):
        engine.save_checkpoint(directory)
    engine.destroy()
    return tuple(map(len, kept))


@pytest.mark.parametrize("stage", range(4))
def test_tensors_are_not_pickled(tmp_path: Path, stage: int) -> None:
    """Master weights are slices that require gradients.

    If pickled, they are copied three times and sent through a pipe.
    """
    for sizes in run_forks(2, sizes_of_calls, str(tmp_path), stage):
        assert sizes
        assert max(sizes) < 50_000
