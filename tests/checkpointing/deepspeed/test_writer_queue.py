"""Checkpoints of one rank: what its writer process has reported counts, however the process ends."""

import os
import resource
import signal
from pathlib import Path

from deepspeed_compress.checkpointing.completeness import Save, find_problems
from deepspeed_compress.checkpointing.deepspeed.writer_queue import Interval, WriterQueue
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.snapshot import NOTHING
from deepspeed_compress.checkpointing.writer import Task
from tests.support.forks import run_forks
from tests.support.transport import until


def open_and_close(rank: int) -> set[str]:
    """Return what a closed queue has left open. A process of its own has no other threads that open descriptors."""
    before = set(os.listdir("/proc/self/fd"))
    queue = WriterQueue(Interval(None))
    queue.close()
    queue.close()
    return {os.path.realpath(f"/proc/self/fd/{left}") for left in set(os.listdir("/proc/self/fd")) - before}


def test_the_end_frees_all_memory_and_descriptors() -> None:
    """A program may make many engines, as a search for hyperparameters does."""
    assert run_forks(1, open_and_close) == [set()]


def save_without_free_descriptors(rank: int, directory: Path) -> list[str]:
    queue, save = WriterQueue(Interval(None)), Save(directory, "global_step1", "run", 1, 1, world=1)
    save.place.mkdir()
    task, memory = Task(CheckpointDirectory(directory, "0" * 32), save, 0, NOTHING, True, 30.0), queue.take_memory()
    queue.begin(task, memory)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    queue.send(task, memory)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    queue.close()
    return [failed.problem for failed in queue.take_failures()]


def test_a_rank_without_free_descriptors_sends_its_checkpoint(tmp_path: Path) -> None:
    """Data loaders with many workers use them up. The writer would wait for the memory, and the rank for the writer."""
    assert run_forks(1, save_without_free_descriptors, tmp_path, timeout=60) == [[]]


def test_states_that_an_earlier_save_of_the_tag_has_left_are_removed(tmp_path: Path) -> None:
    """DeepSpeed counts the files of tensor-parallel ranks when it loads."""
    queue, save = WriterQueue(Interval(None)), Save(tmp_path, "last", "run", 1, 1, world=1)
    save.place.mkdir()
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "random_states.pt"):
        save.place.joinpath(name).touch()
    task, memory = Task(CheckpointDirectory(tmp_path, "0" * 32), save, 0, NOTHING, True, 30.0), queue.take_memory()
    queue.begin(task, memory)
    queue.send(task, memory)
    queue.close()
    assert queue.take_failures() == []
    assert [file.name for file in save.place.glob("*.pt")] == ["random_states.pt"]


def test_a_checkpoint_that_was_complete_before_its_writer_died_stays_complete(tmp_path: Path) -> None:
    queue, save = WriterQueue(Interval(None)), Save(tmp_path, "global_step1", "run", 1, 1, world=1)
    save.place.mkdir()
    task, memory = Task(CheckpointDirectory(tmp_path, "0" * 32), save, 0, NOTHING, True, 30.0), queue.take_memory()
    queue.begin(task, memory)
    queue.send(task, memory)
    writer = queue._writer
    until(writer._connection.poll)
    os.kill(writer.process, signal.SIGKILL)
    os.waitid(os.P_PID, writer.process, os.WEXITED | os.WNOWAIT)
    queue.close()
    assert queue.take_failures() == []
    assert list(find_problems(save.place)) == []
