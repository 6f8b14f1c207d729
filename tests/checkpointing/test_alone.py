"""One job at a time saves in a directory, and its lock never has to be removed by hand."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from deepspeed_compress.safe_files import LOCK, hold


def take(directory: Path, results: Connection, leave_a_child: bool) -> None:
    """Hold the directory until this process is killed. With `leave_a_child`, leave a child that outlives it."""
    held = hold(directory)
    child = os.fork() if leave_a_child else -1
    if not child:
        signal.pause()
    results.send((held is not None, child))
    signal.pause()


def other(directory: Path, leave_a_child: bool = False) -> tuple[multiprocessing.Process, bool, int]:
    """Return the process, whether it holds the lock, and its child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=take, args=(directory, there, leave_a_child), daemon=True)
    process.start()
    has, child = here.recv()
    return process, has, child


def test_a_second_process_does_not_get_it_until_the_first_is_dead(tmp_path: Path) -> None:
    first, has, child = other(tmp_path / "new", leave_a_child=True)
    assert has
    second, has_too, _ = other(tmp_path / "new")
    assert not has_too
    assert hold(tmp_path / "new") is None
    for process in (first, second):
        process.kill()
        process.join()
    # A process that writes what a dead rank has saved does not keep the next job out.
    held = hold(tmp_path / "new")
    os.kill(child, signal.SIGKILL)
    assert held is not None
    held.close()
    assert (tmp_path / "new" / LOCK).stat().st_mode & 0o777 == 0o600


def test_a_process_may_hold_it_twice(tmp_path: Path) -> None:
    """Engines of one program may share a directory."""
    with hold(tmp_path) as one, hold(tmp_path) as two:
        assert one is not None
        assert two is not None
