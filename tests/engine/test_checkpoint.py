"""Saved and resumed is the same as not stopped; what does not fit is said."""

import warnings
from pathlib import Path

import pytest

from deepspeed_compress import CompressWarning, StateError
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, data, run, start, weights

SECTION = {"gradients": {"bits": 4, "block_size": 32, "rounding": "stochastic"}}


def save_and_resume(rank: int, stage: int, directory: str) -> tuple[dict, dict]:
    """Parameters after eight steps, without a break and with a new engine after four."""
    job = Job(stage=stage, section=SECTION, steps=8, zero={"reduce_bucket_size": 600})
    batches = data(rank, job)
    engine = start(job)
    run(engine, batches[:4])
    engine.save_checkpoint(directory)
    engine.save_checkpoint(directory)
    run(engine, batches[4:])
    resumed = start(job)
    resumed.load_checkpoint(directory)
    run(resumed, batches[4:])
    return weights(engine), weights(resumed)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_bit_identical(stage, tmp_path):
    for uninterrupted, resumed in run_forks(2, save_and_resume, stage, str(tmp_path)):
        assert uninterrupted == resumed
    assert len(list(tmp_path.rglob("deepspeed_compress_rank_*.safetensors"))) == 2
    assert not list(tmp_path.rglob("*.tmp"))


def save(rank: int, directory: str) -> None:
    job = Job(stage=2, section=SECTION, steps=2)
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory)


def load(rank: int, directory: str, section: dict, options: dict) -> tuple[list[str], float]:
    """Warnings of ours while loading, and the norm of the residuals afterwards."""
    engine = start(Job(stage=2, section=section))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(directory, **options)
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, CompressWarning)]
    return ours, sum(residuals.square_norm() for residuals in engine.compression.residuals.values())


def test_states_that_do_not_fit(tmp_path):
    run_forks(2, save, str(tmp_path))
    (quiet, norm), _ = run_forks(2, load, str(tmp_path), SECTION, {})
    assert (quiet, norm > 0) == ([], True)
    (quiet, norm), _ = run_forks(2, load, str(tmp_path), SECTION, {"load_optimizer_states": False})
    assert (quiet, norm) == ([], 0.0)
    (texts, norm), _ = run_forks(2, load, str(tmp_path), {"gradients": {"method": "topk"}}, {})
    assert "this run has" in texts[0]
    assert norm == 0.0
    files = sorted(tmp_path.rglob("deepspeed_compress_rank_*"))
    damage(files[1])
    with pytest.raises(RankError, match=f"{StateError.__name__}.*damaged"):
        run_forks(2, load, str(tmp_path), SECTION, {})
    for file in files:
        file.unlink()
    (texts, norm), _ = run_forks(2, load, str(tmp_path), SECTION, {})
    assert "does not exist" in texts[0]


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])
