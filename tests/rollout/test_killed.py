"""A publisher that is killed at any moment loses no version, and goes on after a restart."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver

STEPS = 4


class Deadly(DirectoryStore):
    """Store that kills its process in the middle of a call of `put`."""

    def __init__(self, path: Path, calls: int) -> None:
        super().__init__(path)
        self._path_of_leftovers, self._calls = path, calls

    def put(self, name: str, data: bytes) -> None:
        self._calls -= 1
        if not self._calls:
            self._path_of_leftovers.joinpath(f"{name}.unfinished").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(name, data)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(30, 30)


def train(checkpoint: Path, path: Path, calls: int) -> None:
    """Resume from the newest checkpoint, and publish versions until the store kills the process, or the end."""
    trained, first = model(), 0
    if checkpoint.exists():
        trained.load_state_dict(torch.load(checkpoint))
        first = int(checkpoint.with_suffix(".step").read_text())
    publisher = Publisher(trained, Deadly(path, calls))
    publisher.publish()
    for step in range(first, STEPS):
        with torch.no_grad():
            trained.weight += 1e-4 * torch.randn(30, 30)
        torch.save(trained.state_dict(), checkpoint)
        checkpoint.with_suffix(".step").write_text(str(step + 1))
        publisher.publish()


def run(*args: object) -> int | None:
    """Run `train` in a process. Return its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=train, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def slow(calls: int) -> Any:
    return pytest.param(calls, marks=pytest.mark.slow)


@pytest.mark.parametrize("calls", [*map(slow, (1, 2, 6, 7)), 3, 4, 5])
def test_a_publisher_is_killed_while_it_writes(calls: int, tmp_path: Path) -> None:
    """Each version has two blobs."""
    checkpoint, path = tmp_path / "checkpoint.pt", tmp_path / "store"
    receiver = Receiver(model().to(torch.bfloat16), DirectoryStore(path))
    assert run(checkpoint, path, calls) == -signal.SIGKILL
    receiver.update()
    complete = (calls - 1) // 2
    assert (receiver.version or 0) == complete
    assert run(checkpoint, path, 0) == 0
    assert receiver.update()
    trained = torch.load(checkpoint)
    for name, parameter in receiver._module.named_parameters():
        assert torch.equal(parameter, trained[name].to(torch.bfloat16))
    assert not [name for name in os.listdir(path) if name.endswith(".unfinished")]
