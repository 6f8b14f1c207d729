"""Jobs with agents, as users start them: ranks and hosts are killed, and the job's result stays the same."""

import functools
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_compress.checkpointing.memory_directory import find_host_saves
from deepspeed_compress.launcher.host_resources import job_directory
from deepspeed_compress.local_sgd.coordinator.client import status
from tests.launcher.standstill import Layout, wait_for_steps
from tests.support.agents import (
    Job,
    at_step,
    command,
    hold,
    kill,
    records,
    release,
    result,
    saved_step,
    starts,
    steps,
    until,
    write_config,
)
from tests.support.leftovers import own_port

EVERY = 3
STEPS = 20
LAST = STEPS - 1
"""Step after which ranks wait until the test has done all that it does to them."""
SLOWLY = {"PAUSE": "0.05"}


@pytest.fixture(autouse=True)
def _no_directory_is_left(tmp_path: Path) -> Iterator[None]:
    """Check that an agent removes its directory at the end, and that of a killed agent at its start."""
    yield
    with job_directory():
        pass
    environments = [one["env"] for place in tmp_path.glob("*/") for one in records(place) if "env" in one]
    assert [env for env in environments if Path(env["DS_COMPRESS_MEMORY_DIR"]).exists()] == []


def place(directory: Path, stage: int = 1, **changes) -> Path:
    directory.mkdir()
    write_config(directory, stage, EVERY, **changes)
    return directory


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """Function that returns the result of an undisturbed job at a ZeRO stage."""

    @functools.cache
    def find(stage: int) -> list[dict]:
        directory = place(tmp_path_factory.mktemp("undisturbed") / "job", stage)
        with Job(command(directory, steps=STEPS), directory / "log") as job:
            assert job.wait() == 0, job.log
        assert [step["step"] for step in steps(directory, 0)] == list(range(1, STEPS + 1))
        return result(directory)

    return find


def lost_steps(directory: Path) -> list[int]:
    """Return the number of steps that each start but the first repeated."""
    firsts = [record for record in records(directory) if record["rank"] == 0 and "first" in record]
    most, found = 0, []
    for one in records(directory):
        if one["rank"] != 0:
            continue
        if one in firsts[1:]:
            found.append(most - one["first"])
        most = max(most, one.get("step", 0))
    return found


def kill_held(directory: Path, job: Job, rank: int, step: int) -> None:
    """Kill a rank that waits after `step`, once all checkpoints up to there are complete."""
    start = until(at_step(directory, rank, step), job)
    until(lambda: saved_step(directory) >= step // EVERY * EVERY, job)
    kill(start)
    release(directory, step)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_rank_repeats_few_steps_and_changes_no_bit(tmp_path, undisturbed, stage):
    directory = place(tmp_path / "killed", stage)
    hold(directory, 8, 14)
    with Job(command(directory, steps=STEPS), directory / "log") as job:
        kill_held(directory, job, 1, 8)
        kill_held(directory, job, 0, 14)
        assert job.wait() == 0, job.log
    assert result(directory) == undisturbed(stage)
    assert len(starts(directory, 0)) == 3
    assert all(0 <= lost < EVERY for lost in lost_steps(directory)), lost_steps(directory)
    assert "was killed by SIGKILL" in job.log
    assert "restart 2 of 5, with 2 ranks" in job.log


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(0, memory=True),
        Layout(3, weights=True),
        Layout(1, 4, pipeline=2, weights=True),
        Layout(2, 4, within=2),
        Layout(3, 4, within=2),
    ],
    ids=str,
)
def test_a_restarted_job_has_the_same_bits_in_every_layout(tmp_path, layout):
    places = tmp_path / "killed", tmp_path / "whole"
    stages = {"STAGES": str(layout.pipeline)}
    for directory in places:
        directory.mkdir()
        layout.write(directory)
        if directory == places[0]:
            hold(directory, 5)
        arguments = command(directory, steps=12, ranks=layout.ranks)
        with Job(arguments, directory / "log", **stages) as job:
            if directory == places[0]:
                kill_held(directory, job, layout.ranks - 1, 5)
            assert job.wait() == 0, job.log
    assert result(places[0]) == result(places[1])
    assert [len(starts(directory, 0)) for directory in places] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_be_killed_at_any_time(tmp_path, undisturbed, stage):
    """Ranks are also killed while they start, save, or are being stopped."""
    # Fewer ranks cannot train this configuration, because their bits would differ.
    directory = place(tmp_path / "killed", stage, train_micro_batch_size_per_gpu=6, gradient_accumulation_steps=1)
    hold(directory, LAST)
    draw, killed = random.Random(stage), set[int]()
    options = ("--restarts", "40", "--grace", "2 s")
    with Job(command(directory, *options, steps=STEPS), directory / "log", **SLOWLY) as job:
        for number in range(12):
            # Some starts make steps.
            if number % 3 == 0:
                wait_for_steps(directory, 2, killed, job)
            time.sleep(draw.uniform(0, 1.2))
            ranks = until(lambda: all(found := [starts(directory, rank)[-1:] for rank in range(2)]) and found, job)
            [chosen] = ranks[draw.randrange(2)]
            kill(chosen)
            killed.add(chosen["pid"])
        release(directory, LAST)
        assert job.wait() == 0, job.log
    assert result(directory) == undisturbed(stage)
    # Two checkpoints may be on their way, and a third one in a rank that is a step behind.
    assert all(lost <= 3 * EVERY for lost in lost_steps(directory)), lost_steps(directory)


@pytest.mark.slow
def test_a_hanging_rank_is_restarted(tmp_path):
    directory = place(tmp_path / "hangs")
    hold(directory, LAST)
    with Job(command(directory, "--hang", "3 s", steps=STEPS), directory / "log", **SLOWLY) as job:
        kill(until(at_step(directory, 1, 5), job), signal.SIGSTOP)
        release(directory, LAST)
        until(lambda: len(starts(directory, 1)) > 1, job)
        assert job.wait() == 0, job.log
    assert "no heartbeat from any rank for 3 s (--hang)" in job.log


@pytest.mark.slow
def test_sigterm_saves_and_the_next_job_resumes(tmp_path, undisturbed):
    directory = place(tmp_path / "ended", deepspeed_compress=section(tmp_path / "ended", resume=True))
    hold(directory, 5)
    with Job(command(directory, steps=STEPS), directory / "log", **SLOWLY) as job:
        until(at_step(directory, 1, 5), job)
        job.process.send_signal(signal.SIGTERM)
        until(lambda: "a signal has asked the job to end" in job.log, job)
        release(directory, 5)
        assert job.wait() == 143, job.log
    # The program ends in the step that is saved, before it records that step.
    last = steps(directory, 0)[-1]["step"] + 1
    assert (directory / "checkpoints" / "latest").read_text() == f"global_step{last}"
    with Job(command(directory, steps=STEPS), directory / "log") as job:
        assert job.wait() == 0, job.log
    assert [record["first"] for record in records(directory) if "first" in record and record["rank"] == 0] == [0, last]
    assert result(directory) == undisturbed(1)


def section(directory: Path, **checkpointing) -> dict:
    saving = {"every": EVERY, "directory": str(directory / "checkpoints"), **checkpointing}
    return {"gradients": {"bits": 4, "block_size": 32}, "checkpointing": saving}


@pytest.mark.slow
def test_a_killed_rank_resumes_from_memory_if_the_disk_has_no_checkpoint(tmp_path, undisturbed):
    saving = section(tmp_path / "killed", every=1000, memory={"every": 2})
    directory = place(tmp_path / "killed", deepspeed_compress=saving)
    hold(directory, 9)
    with Job(command(directory, steps=STEPS), directory / "log") as job:
        start = until(at_step(directory, 1, 9), job)
        until(lambda: is_in_memory(directory, "global_step8"), job)
        kill(start)
        release(directory, 9)
        assert job.wait() == 0, job.log
    assert result(directory) == undisturbed(1)
    assert [0 <= lost <= 1 for lost in lost_steps(directory)] == [True], lost_steps(directory)


def is_in_memory(directory: Path, tag: str) -> bool:
    """Return True if the checkpoint `tag` is complete in the memory of the host of a job with two ranks."""
    memory = Path(starts(directory, 0)[-1]["env"]["DS_COMPRESS_MEMORY_DIR"])
    found = [held for place in memory.iterdir() for held in find_host_saves(place)[0] if held.tag == tag]
    return any(held.lists.keys() == {0, 1} for held in found)


@pytest.mark.slow
def test_checkpoints_of_another_job_are_refused_without_a_restart(tmp_path):
    directory = place(tmp_path / "job")
    with Job(command(directory, steps=4), directory / "log") as job:
        assert job.wait() == 0, job.log
    with Job(command(directory, "--restarts", "1", steps=8), directory / "log") as job:
        assert job.wait() == 1, job.log
    assert "already has checkpoints" in job.log
    assert "a restart cannot help" in job.log
    assert "restart 1 of 1" not in job.log
    assert not [record for record in records(directory) if record.get("first")]


def hosts(directory: Path, port: int, *options: str, ranks: int = 1) -> list[str]:
    return command(directory, "--hosts", "2", "--rendezvous", f"127.0.0.1:{port}", *options, steps=STEPS, ranks=ranks)


@pytest.mark.slow
def test_a_spare_host_takes_over_and_without_one_fewer_ranks_train_the_same_batches(tmp_path):
    directory = place(tmp_path / "hosts")
    hold(directory, 5, 10)
    with own_port() as port:
        arguments = hosts(directory, port, "--spares", "1")
        with Job(arguments, directory / "log_0") as first:
            until(lambda: "nothing" if port_is_open(port) else None, first)
            with Job(arguments, directory / "log_1") as second:
                until(lambda: starts(directory, 1), second)
                with Job(arguments, directory / "log_2") as third:
                    until(lambda: len(status(f"127.0.0.1:{port}")["hosts"]) == 3, third)
                    until(at_step(directory, 1, 5), third)
                    second.process.kill()
                    release(directory, 5)
                    until(lambda: len(starts(directory, 1)) == 2, third)
                    until(at_step(directory, 1, 10), third)
                    third.process.kill()
                    release(directory, 10)
                    assert first.wait() == 0, first.log
    worlds = [record["world"] for record in records(directory) if "world" in record and record["rank"] == 0]
    assert worlds == [2, 2, 1]
    assert len(starts(directory, 0)) == 3
    assert {step["step"] for step in steps(directory, 0)} == set(range(1, STEPS + 1))


def port_is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


PROGRAM = """
import os, sys
print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["DS_COMPRESS_HOSTS"], sys.argv)
assert os.stat(os.environ["DS_COMPRESS_MEMORY_DIR"]).st_mode & 0o777 == 0o700
assert os.stat(os.path.dirname(os.environ["DS_COMPRESS_MEMORY_DIR"])).st_mode & 0o777 == 0o700
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_programs_get_the_variables_of_torchrun_and_their_exit_codes_count(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    base = [sys.executable, "-m", "deepspeed_compress.cli", "run", "--restarts", "1", "--ranks", "2"]
    with Job([*base, str(program), "0"], tmp_path / "log") as job:
        assert job.wait() == 0, job.log
    assert '1 1 2 ["127.0.0.1"]' in job.log
    with Job([*base, str(program), "3"], tmp_path / "log") as job:
        assert job.wait() == 1
    assert "exited with code 3, and no restart is left (--restarts 1)" in job.log


@pytest.mark.slow
def test_two_jobs_of_one_user_do_not_interfere(tmp_path):
    directories = [place(tmp_path / name) for name in ("one", "two")]
    hold(directories[0], 5)
    jobs = [Job(command(one, steps=STEPS), one / "log", **SLOWLY) for one in directories]
    with jobs[0], jobs[1]:
        kill_held(directories[0], jobs[0], 1, 5)
        assert [job.wait() for job in jobs] == [0, 0], "".join(job.log for job in jobs)
    one, two = (starts(directory, 0)[0]["env"] for directory in directories)
    for name in ("MASTER_PORT", "DS_COMPRESS_AGENT", "DS_COMPRESS_MEMORY_DIR"):
        assert one[name] != two[name]
    assert result(directories[0]) == result(directories[1])
    assert len(starts(directories[1], 0)) == 1
