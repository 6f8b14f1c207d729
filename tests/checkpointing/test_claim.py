"""Writer processes that outlive their ranks never change what a later start of the job has saved."""

import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_compress.checkpointing.completeness import Save, find_problems, read_lists
from deepspeed_compress.checkpointing.deepspeed import engine_files
from deepspeed_compress.checkpointing.deepspeed.engine_files import write_torch
from deepspeed_compress.checkpointing.directory import CheckpointDirectory, this_start
from deepspeed_compress.checkpointing.snapshot import Call, HostCopies, Memory, Snapshot
from deepspeed_compress.checkpointing.writer import Outcome, Task, Writer
from deepspeed_compress.compression import state
from deepspeed_compress.compression.state_description import Moment, Position
from deepspeed_compress.errors import StateError
from tests.support.forks import run_forks

OLD, NEW = "0" * 32, "1" * 32
LATE = "another start of the job has claimed it"


def test_the_newest_start_has_the_directory(tmp_path):
    old, new = CheckpointDirectory(tmp_path, OLD), CheckpointDirectory(tmp_path, NEW)
    old.claim()
    old.check()
    new.claim()
    new.check()
    with pytest.raises(StateError, match=LATE):
        old.check()


def test_nobody_is_kept_out_where_nobody_has_claimed(tmp_path):
    CheckpointDirectory(tmp_path, OLD).check()
    CheckpointDirectory(tmp_path / "gone", OLD).check()


def test_all_engines_of_a_process_are_of_one_start():
    assert this_start() == this_start() != run_forks(1, this_start_of_rank)[0]


def this_start_of_rank(rank: int) -> str:
    return this_start()


def test_taking_a_directory_waits_for_a_rename_in_progress(tmp_path):
    old, new = CheckpointDirectory(tmp_path, OLD), CheckpointDirectory(tmp_path, NEW)
    old.claim()
    with old.held():
        taking = threading.Thread(target=new.claim)
        taking.start()
        taking.join(0.5)
        assert taking.is_alive()
    taking.join(10)
    assert not taking.is_alive()


def write_state(file: Path, claim: CheckpointDirectory) -> None:
    state.write(state.contents({}, Position(0, 1, 0, 1), Moment(0, 5), {}, {}), file, claim.held)


def write_tensors(file: Path, claim: CheckpointDirectory) -> None:
    write_torch({}, file, None, claim.held)


@pytest.mark.parametrize("write", [write_tensors, write_state])
def test_a_late_process_writes_nothing(tmp_path, write: Callable[[Path, CheckpointDirectory], None]):
    old = CheckpointDirectory(tmp_path, OLD)
    CheckpointDirectory(tmp_path, NEW).claim()
    before = set(tmp_path.iterdir())
    with pytest.raises(StateError, match=LATE):
        write(tmp_path / "file.safetensors", old)
    assert set(tmp_path.iterdir()) == before


class Full(io.RawIOBase):
    """File on a disk without any space left."""

    def __init__(self, path: Path, *args: object) -> None:
        super().__init__()
        path.write_bytes(b"a part")

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")


def save_part(contents: object, path: Path) -> None:
    Full(path).write(contents)


@pytest.mark.parametrize("write", [write_tensors, write_state])
def test_a_full_disk_is_left_as_it_was(tmp_path, monkeypatch, write: Callable[[Path, CheckpointDirectory], None]):
    monkeypatch.setattr(engine_files, "DirectFile", Full)
    monkeypatch.setattr(state, "save_file", save_part)
    with pytest.raises((OSError, RuntimeError)):
        write(tmp_path / "file.safetensors", CheckpointDirectory(tmp_path, NEW))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path):
    file, other = tmp_path / "[1]_states.pt", tmp_path / "1_states.pt.123.tmp"
    for one in (file.with_name(f"{file.name}.123.tmp"), other):
        one.touch()
    write_tensors(file, CheckpointDirectory(tmp_path, NEW))
    assert sorted(tmp_path.iterdir()) == sorted([file, other])


class Rank:
    """Writer process of a rank of the start `start`, with the snapshot of a checkpoint that two ranks save."""

    def __init__(self, directory: Path, start: str, rank: int) -> None:
        save = Save(directory, "global_step3", run=start[:8], number=1, step=3, world=2)
        file = save.place / f"{rank}_states.pt"
        self._memory = Memory()
        snapshot = Snapshot(self._memory, HostCopies())
        claim = CheckpointDirectory(directory, start)
        snapshot.add(Call(write_torch, (torch.full((9,), float(start[0])), file, None, claim.held), (file,)))
        snapshot.copy()
        self._task = Task(claim, save, rank, snapshot.kept(), publishes=rank == 0, patience=10.0)
        self.writer = Writer()

    def write(self) -> None:
        self.writer.send(self._task, self._memory.descriptor)

    def outcome(self) -> Outcome:
        return next(self.writer.outcomes(wait=True))


def come_late(rank: int, directory: Path) -> None:
    """The writer of rank 1 of the former start continues after its successor has written, but before rank 0 has."""
    (directory / "global_step3").mkdir(parents=True)
    former, newer, publishes = Rank(directory, OLD, 1), Rank(directory, NEW, 1), Rank(directory, NEW, 0)
    os.kill(former.writer.process, signal.SIGSTOP)
    CheckpointDirectory(directory, OLD).claim()
    former.write()
    CheckpointDirectory(directory, NEW).claim()
    newer.write()
    assert newer.outcome().problem == ""
    os.kill(former.writer.process, signal.SIGCONT)
    assert LATE in former.outcome().problem
    publishes.write()
    assert publishes.outcome().problem == ""
    for one in (former, newer, publishes):
        one.writer.close()


def test_a_process_of_a_former_start_does_not_hold_up_the_next(tmp_path):
    run_forks(1, come_late, tmp_path)
    place = tmp_path / "global_step3"
    assert [one.run for one in read_lists(place)] == [NEW[:8]] * 2
    assert list(find_problems(place)) == []
    assert torch.load(place / "1_states.pt").tolist() == [1.0] * 9
    assert CheckpointDirectory(tmp_path).latest_tag() == "global_step3"
