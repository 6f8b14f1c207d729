"""Statistics of a step: bytes derived from the layout, times, and quality of compression."""

import itertools
import math
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.compression.compressors import Blockwise
from deepspeed_compress.session.observer import BusyTimes, largest_of_all
from deepspeed_compress.tools.run_directory import read_statistics
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, statistics_lines
from tests.support.messages import caught_warnings

pytestmark = pytest.mark.sampled(4)

NUMEL = sum(inner * outer + outer for inner, outer in ((12, 31), (31, 17), (17, 3))) + 3


def lines(directory: Path, stage: int, monitor: dict, gradients=None, ranks=2, schedule=None, **job) -> list[dict]:
    gradients = gradients or {"bits": 8, "block_size": 32}
    section = {"gradients": gradients, "monitor": {"path": str(directory), **monitor}, "schedule": schedule or {}}
    job = {"steps": 6, **job}
    run_forks(ranks, work, Job(stage=stage, section=section, zero={"reduce_bucket_size": 10**6}, **job))
    return statistics_lines(directory)


def work(rank: int, job: Job) -> None:
    run(start(job), data(rank, job))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_follow_from_the_sizes(stage, tmp_path):
    found = lines(tmp_path, stage, {})
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    # With two ranks, a rank sends the half that the other one owns. Under ZeRO 0 it also sends its own half of the
    # mean.
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


def busy(rank: int) -> list[list[float]]:
    """Return the busy times of measured steps while other sums run."""
    deepspeed.init_distributed("gloo")
    times, found = BusyTimes(torch.device("cpu")), []
    for milliseconds in (None, 10.0 + rank, 20.0 - rank, 5.0):
        found.append(times.next(milliseconds))
        dist.all_reduce(torch.ones(1))
    return found


def test_busy_times_of_all_ranks_are_known_one_measured_step_late():
    assert run_forks(2, busy) == [[[], [], [10.0, 11.0], [20.0, 19.0]]] * 2


def test_lines_have_the_busy_times_of_the_line_before(tmp_path):
    found = lines(tmp_path, 1, {})
    assert [line["busy_ms_max"] is None for line in found] == [True, True] + [False] * 4
    for before, line in itertools.pairwise(found[1:]):
        assert line["busy_ms_max"] >= before["busy_ms"] - 1e-9
        assert line["busy_ms_max"] >= line["busy_ms_median"]


def test_micro_steps_add_up(tmp_path):
    """ZeRO 2 reduces in every micro-step, ZeRO 1 once per step."""
    twice = lines(tmp_path / "two", 2, {}, accumulation=2)[0]["bytes_sent"]
    once = lines(tmp_path / "one", 1, {}, accumulation=2)[0]["bytes_sent"]
    assert twice == pytest.approx(2 * once, abs=64)


TWO_NODES = {"bits": 4, "block_size": 32, "hierarchy": {"ranks_per_node": 2}}
POWERSGD = {"method": "powersgd", "rank": 2}
METHODS = {
    "blockwise": (0, {"bits": 4, "block_size": 32}),
    "clipped": (2, {"method": "dgc", "density": 0.1, "momentum": 0.9, "clip_norm": 1.0}),
    "powersgd everywhere": (0, POWERSGD),
    "powersgd to owners": (2, POWERSGD),
    "two levels": (0, {**TWO_NODES, "hierarchy": {"ranks_per_node": 2, "inside": {"method": "blockwise"}}}),
    "two levels, dense inside": (2, TWO_NODES),
}
"""ZeRO stage and settings of gradients, by name."""
FIRST_LAYERS = [{"parameters": "^[02][.]", "method": "none"}]
"""Overrides for more than half of the model, so that some of it belongs to the rank that does not report."""


@pytest.mark.parametrize("method", METHODS)
def test_uncompressed_bytes_are_counted(method, tmp_path):
    """A dense step sends everything uncompressed. Other steps send less, but more if layers are excluded."""
    optimizer = {"type": "AdamW", "params": {"betas": [0.0, 0.95], "torch_adam": True}}
    shared = {"ranks": 4 if "levels" in method else 2, "steps": 2, "extra": {"optimizer": optimizer}}
    stage, settings = METHODS[method]
    gradients = {"min_numel": 0, **settings}
    [dense, some] = lines(tmp_path / "some", stage, {}, gradients, schedule={"warmup_steps": 1}, **shared)
    assert dense["bytes_raw"] == dense["bytes_sent"] > some["bytes_sent"]
    overridden = {**gradients, "overrides": FIRST_LAYERS}
    more = lines(tmp_path / "more", stage, {}, overridden, **shared)[0]
    assert some["bytes_raw"] < more["bytes_raw"] <= more["bytes_sent"]


def test_uncompressed_gradients_to_the_byte(tmp_path):
    """With two ranks, an element is sent once to its owner, and under ZeRO 0 once back: 51 biases of 4 bytes each."""
    gradients = {"bits": 8, "block_size": 32, "min_numel": 0, "overrides": [{"parameters": "bias$", "method": "none"}]}
    [found] = lines(tmp_path, 0, {}, gradients, steps=1)
    assert found["bytes_raw"] == 4 * (31 + 17 + 3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_without_compression_all_is_uncompressed(stage, tmp_path):
    [found] = lines(tmp_path, stage, {}, {"method": "none"}, steps=1)
    assert found["bytes_raw"] == found["bytes_sent"] == found["bytes_uncompressed"] > 0
    assert (found["rank"], found["bytes_pipeline"], found["bytes_tied"], found["bytes_tensor"]) == (0, 0, 0, 0)


def test_events_for_deepspeeds_monitor(tmp_path):
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    lines(tmp_path / "run", 2, {}, extra={"csv_monitor": csv})
    assert (tmp_path / "job" / "Train_Samples_compression_bytes_sent.csv").read_text().count("\n") >= 6


def stop_and_resume(rank: int, job: Job, directory: str) -> None:
    """Train seven steps, save after four of them, and train two more from there in another engine."""
    batches = data(rank, job)
    engine = start(job)
    run(engine, batches[:4])
    engine.save_checkpoint(directory)
    run(engine, batches[4:7])
    engine.destroy()
    engine = start(job)
    engine.load_checkpoint(directory)
    run(engine, batches[4:6])


@pytest.mark.parametrize("gradients", [{"bits": 8}, {"method": "none"}], ids=["8 bits", "none"])
def test_a_resumed_run_keeps_its_name_and_a_new_one_in_the_same_place_has_another(gradients, tmp_path):
    """This also holds if the checkpoint has no compression state."""
    statistics = tmp_path / "statistics"
    section = {"gradients": gradients, "monitor": {"path": str(statistics)}}
    run_forks(2, stop_and_resume, Job(2, section, steps=8), str(tmp_path / "checkpoints"))
    written = statistics_lines(statistics)
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6, 7, 5, 6]
    assert [line["run"]["since"] for line in written] == [0] * 7 + [4] * 2
    assert len({line["run"]["id"] for line in written}) == 1
    assert [line["step"] for line in read_statistics(statistics)] == [1, 2, 3, 4, 5, 6]
    run_forks(2, work, Job(2, section, steps=2))
    assert [line["step"] for line in read_statistics(statistics)] == [1, 2]
    assert len(statistics_lines(statistics)) == 11


def without_a_place(rank: int, jobs: list[Job], file: str) -> list:
    """Return the losses of each job, and its warnings about `file`."""
    found = []
    for job in jobs:
        with caught_warnings() as texts:
            engine = start(job)
            found.append(run(engine, data(rank, job)))
            engine.destroy()
        found.append([text for text in texts if file in text])
    return found


def test_statistics_that_cannot_be_written_stop_no_rank(tmp_path):
    """The path is a file. There is one warning on the rank that writes, and training is unchanged."""
    file = tmp_path / "file"
    file.write_text("")
    schedule = {"ramp": {"steps": 4, "stages": [{"bits": 8}, {"bits": 4}]}}
    section = {"gradients": {"bits": 2}, "schedule": schedule}
    jobs = [Job(2, {**section, "monitor": {"path": str(path)}}, steps=6) for path in (tmp_path / "a", file)]
    found = run_forks(2, without_a_place, jobs, str(file))
    for losses, _, same, _ in found:
        assert same == losses
    assert [len(texts) for *_, texts in found] == [1, 0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_ratio_of_all_traffic_has_weights_in_it(stage, tmp_path):
    """DeepSpeed alone sends the same bytes in both cases."""
    section = {"gradients": {"bits": 8, "block_size": 32}}
    zero = {"reduce_bucket_size": 10**6}
    alone = []
    for name, weights in (("plain", None), ("compressed", {"bits": 8, "block_size": 32})):
        monitor = {"path": str(tmp_path / name)}
        job = Job(
            stage, {**section, **({"weights": weights} if weights else {}), "monitor": monitor}, zero=zero, steps=3
        )
        run_forks(2, work, job)
        last = statistics_lines(tmp_path / name)[-1]
        sent = last["bytes_sent"] + last["bytes_weights"]
        alone.append(last["total_ratio"] * sent)
        assert (last["bytes_weights_saved"] > 0) == (weights is not None)
        assert alone[-1] == pytest.approx(
            last["bytes_uncompressed"] + last["bytes_weights"] + last["bytes_weights_saved"]
        )
        assert last["total_ratio"] < last["ratio"]
    assert alone[0] == pytest.approx(alone[1], rel=0.02)


def largest(rank: int) -> list[float]:
    deepspeed.init_distributed("gloo", verbose=False)
    return largest_of_all([value if rank else 1.0 for value in (math.inf, math.nan, 2.0, -math.inf)], "cpu")


def test_a_value_that_is_not_finite_on_one_rank_is_not_finite_on_all() -> None:
    """An infinite norm must not become the largest finite number, which would pass as a norm."""
    assert run_forks(2, largest) == [[math.inf, math.inf, 2.0, 1.0]] * 2
