"""Compressed weights are exact for every reader: a file, a state dict, all ranks or one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start
from tests.support.methods import FP32_SUMS

SECTION = {"weights": {"bits": 4, "block_size": 32}}


def distance(engine: Any) -> float:
    """Return the largest difference between this rank's own weights and its master weights, rounded alike."""
    optimizer, rank = engine.optimizer, torch.distributed.get_rank()
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        masters = optimizer.fp32_groups_flat_partition
        held = [flat.chunk(2)[rank] for flat in optimizer.bf16_groups_flat]
    else:
        masters = optimizer.single_partition_of_fp32_groups
        held = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    return max(float((master.to(own.dtype) - own).abs().max()) for master, own in zip(masters, held, strict=True))


def save_model(rank: int, job: Job, directory: str) -> tuple[list[float], list[bool]]:
    """Return distances, and whether weights count as behind, after training, after saving, and after another step."""
    engine = start(job)
    batches = data(rank, job)
    distances, behind = [], []

    def note() -> None:
        distances.append(distance(engine))
        behind.append(engine.compression.exact.behind)

    run(engine, batches[:-1])
    note()
    engine.save_16bit_model(directory)
    note()
    saved = torch.load(Path(directory) / "pytorch_model.bin", weights_only=True) if rank == 0 else {}
    assert all(torch.equal(saved[name], own) for name, own in engine.module.state_dict().items() if name in saved)
    assert rank or saved
    run(engine, batches[-1:])
    note()
    engine.compression.synchronise()
    note()
    return distances, behind


@pytest.mark.parametrize(
    "job",
    [Job(stage=1, section=SECTION), Job(stage=2, section=SECTION), Job(stage=1, section=SECTION, extra=FP32_SUMS)],
)
def test_the_model_that_is_saved_is_exact(job: Job, tmp_path: Path) -> None:
    for distances, behind in run_forks(2, save_model, job, str(tmp_path)):
        assert [one > 0 for one in distances] == behind == [True, False, True, False]


def uncompressed(rank: int, stage: int, directory: str) -> bool:
    engine = start(Job(stage=stage, section={"gradients": {"bits": 4}}))
    run(engine, data(rank, Job(steps=1)))
    engine.compression.synchronise()
    engine.save_16bit_model(directory)
    return engine.compression.exact is None


@pytest.mark.parametrize("stage", [0, 2])
def test_uncompressed_weights_are_never_behind(stage: int, tmp_path: Path) -> None:
    assert run_forks(2, uncompressed, stage, str(tmp_path)) == [True, True]
