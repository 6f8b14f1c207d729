"""Memory of publishers and receivers: copies of the weights, and what does not grow with the model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from launch.studies.version_costs import peak, resident
from tests.support.forks import run_forks
from tests.support.processes import MEGABYTE

LAYERS = 4


def model_of(size: int) -> nn.Module:
    """Return a model whose bf16 weights have `size` MB."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(1024, size * MEGABYTE // (2 * 1024 * LAYERS), False, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    return nn.ModuleList(layers)


def change(model: nn.Module) -> None:
    """Change a fiftieth of the values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::50] += 1.0


def publisher_memory(rank: int, store: Path, size: int, asynchronous: bool) -> float:
    """Return the most memory that a publisher takes in addition to the model, in MB."""
    model = model_of(size)
    before = resident()
    with peak() as most:
        publisher = Publisher(model, DirectoryStore(store), asynchronous=asynchronous)
        for _ in range(2):
            publisher.publish()
            publisher.wait()
            change(model)
    return (most[0] - before) / MEGABYTE


def receiver_memory(rank: int, store: Path, size: int) -> float:
    """Return the most memory that a receiver takes in addition to the module, in MB."""
    publisher_memory(rank, store, size, False)
    model = model_of(size)
    before = resident()
    with peak() as most:
        assert Receiver(model, DirectoryStore(store)).update()
    return (most[0] - before) / MEGABYTE


@pytest.mark.serial
@pytest.mark.parametrize(
    ("measure", "settings", "copies"),
    [(publisher_memory, (False,), 1), (publisher_memory, (True,), 2), (receiver_memory, (), 0)],
    ids=["publisher", "asynchronous", "receiver"],
)
def test_memory_is_bounded(
    measure: Callable[..., float], settings: tuple[bool, ...], copies: int, tmp_path: Path
) -> None:
    """See docs/rollout.md."""
    small, large = (run_forks(1, measure, tmp_path / f"{size}", size, *settings)[0] for size in (128, 384))
    assert small < copies * 128 + 400
    assert large - small < copies * 256 + 64
