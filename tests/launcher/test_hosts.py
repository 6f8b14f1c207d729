"""Jobs with agents on emulated hosts: links fail, some return, and the job's result stays the same."""

import functools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_compress.launcher.supervisor import LOST_AFTER
from tests.launcher.standstill import most_lost
from tests.support.agents import (
    Job,
    at_step,
    command,
    hold,
    kill,
    records,
    release,
    result,
    starts,
    steps,
    until,
    write_config,
)
from tests.support.agents_on_hosts import STARTING, Cut, HostsJob
from tests.support.hosts import needs_hosts

EVERY = 3
STEPS = 20
LAST = STEPS - 1
"""Step after which ranks wait until the test has cut all links that it cuts."""
GOAL = 30.0
"""Longest interruption of a job in seconds, on a machine without other work."""
LOST = "cannot be reached: it"
"""What an agent prints when it gives another host up."""


def place(directory: Path, every: int = EVERY, memory: dict | None = None, **changes) -> Path:
    directory.mkdir()
    saving = {"every": every, "directory": str(directory / "checkpoints"), "keep": 3}
    saving |= {} if memory is None else {"memory": memory}
    section = {"gradients": {"bits": 4, "block_size": 32}, "checkpointing": saving}
    write_config(directory, deepspeed_compress=section, **changes)
    return directory


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Function that returns the directory of an undisturbed job with this number of ranks on one host."""

    @functools.cache
    def find(ranks: int) -> Path:
        directory = place(tmp_path_factory.mktemp("undisturbed") / "job")
        with Job(command(directory, steps=STEPS, ranks=ranks), directory / "log") as job:
            assert job.wait() == 0, job.log
        return directory

    return find


def of_starts(directory: Path, key: str) -> list[int]:
    """Return what rank 0 has recorded of each start: its `world` size, or the `first` step that it loaded."""
    return [record[key] for record in records(directory) if key in record and record["rank"] == 0]


def losses(directory: Path, world: int) -> set[tuple[int, float]]:
    """Return (step, loss) of rank 0 in starts with `world` ranks."""
    found, now = set(), 0
    for record in records(directory):
        if record["rank"] == 0:
            now = record.get("world", now)
            found |= {(record["step"], record["loss"])} if "loss" in record and now == world else set()
    return found


def check(job: HostsJob, cut: Cut, down: float = 0.0) -> None:
    """Check that cut-off ranks end before others start, because both would write the same checkpoints.

    The job could not go on for `down` seconds.
    """
    took = job.resumed(cut)
    # A busy machine slows down every start, and may be busier than at the first one.
    limit = max(GOAL, LOST_AFTER + down + 3 * job.seconds_to_start())
    print(f"after the cut: {took}, at most {limit:.0f} s")
    assert took.ended < took.begun, took
    assert took.step < limit, took


def check_lost(directory: Path) -> None:
    print(f"at most {most_lost(directory)} steps repeated")
    assert 0 <= most_lost(directory) <= EVERY


@pytest.mark.slow
@needs_hosts
def test_a_spare_takes_over_from_a_host_that_is_cut_off(tmp_path, undisturbed):
    directory = place(tmp_path / "job")
    hold(directory, LAST)
    with HostsJob(directory, 2, 1, last=STEPS) as job:
        job.until_saved(6)
        cut = job.cut(job.others()[:1])
        release(directory, LAST)
        check(job, cut)
        assert job.end() == [0, 0], job.log
        assert LOST in job.log
    assert result(directory) == result(undisturbed(2))
    assert of_starts(directory, "world") == [2, 2]
    check_lost(directory)


@pytest.mark.slow
@needs_hosts
def test_after_a_hang_and_a_lost_host_fewer_ranks_train_the_same_batches(tmp_path, undisturbed):
    directory = place(tmp_path / "job")
    hold(directory, LAST)
    # A step of a busy machine may take seconds.
    with HostsJob(directory, 2, 0, "--hang", "20 s", last=STEPS) as job:
        job.until_saved(3)
        [host] = job.others()
        kill(starts(directory, job.hosts().index(host))[-1], signal.SIGSTOP)
        stopped = time.time()
        until(lambda: len(of_starts(directory, "world")) == 2, job.agents[0])
        print(f"begun {time.time() - stopped:.1f} s after SIGSTOP")
        job.until_saved(9)
        cut = job.cut([host])
        release(directory, LAST)
        check(job, cut)
        assert job.end() == [0], job.log
    assert of_starts(directory, "world") == [2, 2, 1]
    assert losses(directory, 2) < losses(undisturbed(2), 2)
    assert {step["step"] for step in steps(directory, 0)} == set(range(1, STEPS + 1))
    check_lost(directory)


@pytest.mark.slow
@needs_hosts
def test_a_host_rejoins_after_its_link_returns(tmp_path, undisturbed):
    """The link is down for a moment, and later until the host is given up."""
    # Fewer ranks cannot train this configuration, because their bits would differ.
    directory = place(tmp_path / "job", train_micro_batch_size_per_gpu=6, gradient_accumulation_steps=1)
    hold(directory, LAST)
    with HostsJob(directory, 2, 0, last=STEPS) as job:
        job.until_saved(3)
        [host] = job.others()
        cut, made = time.time(), steps(directory, 0)[-1]["step"]
        job.cluster.cut(host)
        time.sleep(4)
        job.cluster.mend(host)
        until(lambda: steps(directory, 0)[-1]["step"] > made + 1, job.agents[0])
        print(
            f"link down for 4 s: next step after {time.time() - cut:.1f} s, {len(of_starts(directory, 'world'))} starts"
        )
        job.until_saved(9)
        given_up = job.log.count(LOST)
        longer = job.cut([host])
        release(directory, LAST)
        until(lambda: job.log.count(LOST) > given_up, job.agents[0])
        job.cluster.mend(host)
        check(job, longer, time.time() - longer.time)
        assert job.end() == [0, 0], job.log
    assert result(directory) == result(undisturbed(2))
    assert set(of_starts(directory, "world")) == {2}
    check_lost(directory)


@pytest.mark.slow
@needs_hosts
def test_one_lost_host_loads_from_its_neighbors_memory_and_two_load_from_disk(tmp_path, undisturbed):
    """The first host that is cut off returns as a spare for the two hosts that are cut off together."""
    directory = place(tmp_path / "job", every=15, memory={"every": 2, "copies": 1})
    hold(directory, 8, 17)
    with HostsJob(directory, 3, 2, last=STEPS) as job:
        until(at_step(directory, 0, 8), job.agents[0], STARTING)
        lost = job.others()[0]
        cut = job.cut([lost])
        release(directory, 8)
        check(job, cut)
        job.cluster.mend(lost)
        until(at_step(directory, 0, 17), job.agents[0])
        job.until_saved(15)
        job.until_joined(lost)
        both = job.others()
        release(directory, 17)
        check(job, job.cut(both))
        assert lost in job.hosts()
        assert job.end() == [0, 0, 0], job.log
        assert "global_step16 in memory is ignored: no host has the files of ranks" in job.log
    first, second, third = of_starts(directory, "first")
    assert (first, third) == (0, 15)
    assert second in (6, 8), "these steps exist only in memory"
    assert result(directory) == result(undisturbed(3))
