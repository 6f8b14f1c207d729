"""What is reported of a step: bytes from the layout alone, times, quality."""

import math
from pathlib import Path

import pytest

from deepspeed_compress.compressors import Blockwise
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, statistics_lines

NUMEL = sum(inner * outer + outer for inner, outer in ((12, 31), (31, 17), (17, 3))) + 3


def lines(directory: Path, stage: int, monitor: dict, **job) -> list[dict]:
    section = {"gradients": {"bits": 8, "block_size": 32}, "monitor": {"path": str(directory), **monitor}}
    run_forks(2, work, Job(stage=stage, section=section, steps=6, zero={"reduce_bucket_size": 10**6}, **job))
    return statistics_lines(directory)


def work(rank: int, job: Job) -> None:
    run(start(job), data(rank, job))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_follow_from_the_sizes(stage, tmp_path):
    found = lines(tmp_path, stage, {})
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    # Two ranks: a rank sends the half that the other one owns, for ZeRO 0 also its own half of the mean.
    messages = 2 if stage == 0 else 1
    predicted = messages * Blockwise(8, 32).payload_bytes(math.ceil(NUMEL / 2))
    assert all(abs(line["bytes_sent"] - predicted) <= 16 * messages for line in found)
    assert all(line["ratio"] > 1.5 for line in found)
    assert all(line["compress_ms"] > 0 and line["communicate_ms"] > 0 for line in found)
    assert all(0 < line["residual_norm"] < math.inf for line in found)


def test_sampled_cosine_and_interval(tmp_path):
    found = lines(tmp_path, 2, {"every": 2, "cosine_every": 3})
    assert [line["step"] for line in found] == [2, 4, 6]
    # Steps 0 and 3 (counted from zero) were sampled; step 3 is the fourth.
    assert [line["cosine"] is not None for line in found] == [False, False, True]
    assert 0.99 < found[2]["cosine"] <= 1.0 + 1e-6


def test_micro_steps_add_up(tmp_path):
    """ZeRO 2 reduces in every micro-step, ZeRO 1 once a step."""
    twice = lines(tmp_path / "two", 2, {}, accumulation=2)[0]["bytes_sent"]
    once = lines(tmp_path / "one", 1, {}, accumulation=2)[0]["bytes_sent"]
    assert twice == pytest.approx(2 * once, abs=64)


def test_events_for_deepspeeds_monitor(tmp_path):
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    lines(tmp_path / "run", 2, {}, extra={"csv_monitor": csv})
    assert (tmp_path / "job" / "Train_Samples_compression_bytes_sent.csv").read_text().count("\n") >= 6
