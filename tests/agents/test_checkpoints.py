"""Checkpoints between batches of rollouts: when they are saved, and which directories are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_compress.agents.learner import Checkpoints
from deepspeed_compress.errors import StateError
from tests.support.forks import run_forks


class Engine:
    """An engine that saves no more than the client's state."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, int]] = {}

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, int]) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / "latest").write_text(tag)
        self.saved[tag] = client_state

    def load_checkpoint(self, directory: str) -> tuple[str, dict[str, Any]]:
        tag = (Path(directory) / "latest").read_text()
        return tag, self.saved[tag]


def test_some_batches_and_the_last_one_are_saved_and_a_run_continues_after_the_newest(tmp_path: Path) -> None:
    engine, directory = Engine(), tmp_path / "checkpoints"
    checkpoints = Checkpoints(engine, directory, every=3, resume=True)
    assert checkpoints.batches == 0
    for batches in range(1, 9):
        checkpoints.save_if_due(batches, last=batches == 8)
    assert list(engine.saved) == ["batch3", "batch6", "batch8"]
    assert Checkpoints(engine, directory, resume=True).batches == 8
    with pytest.raises(StateError, match="has checkpoints of an earlier run: write resume=True"):
        Checkpoints(engine, directory)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    engine.save_checkpoint(str(tmp_path), "global_step5", {})
    with pytest.raises(StateError, match="does not tell its number of batches"):
        Checkpoints(engine, tmp_path, resume=True)


def test_an_interval_below_one_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every is 0 \(allowed: 1 or more\)"):
        Checkpoints(Engine(), tmp_path, every=0)


class Saved(Engine):
    """An engine that loads a checkpoint, although this rank may not see it yet."""

    def load_checkpoint(self, directory: str) -> tuple[str, dict[str, Any]]:
        return "batch3", {"batches": 3}


def resume_late(rank: int, directory: Path) -> int:
    """Return the number of batches if only the first rank sees the checkpoint."""
    dist.init_process_group("gloo", rank=rank)
    return Checkpoints(Saved(), directory / str(rank), resume=True).batches


def test_all_ranks_continue_from_the_checkpoint_that_the_first_one_finds(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "latest").write_text("batch3")
    assert run_forks(2, resume_late, tmp_path) == [3, 3]
