"""Locks that an interrupted build has left."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from deepspeed_compress import CompressWarning, cli
from deepspeed_compress.backends.deepspeed.builds import abandoned_locks, clear_locks, warn_of_abandoned_locks
from tests.support.processes import run_python


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Create a lock that is an hour old and belongs to no process."""
    return old(tmp_path / "cpu_adam" / "lock")


def old(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch()
    before = time.time() - 3600
    os.utime(path, (before, before))
    return path


def test_an_abandoned_lock_is_found_with_the_command_that_removes_it(lock: Path, tmp_path: Path) -> None:
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with pytest.warns(CompressWarning, match=rf"{lock}: .* 60 minutes .* loads cpu_adam .* type: rm {lock}$"):
        warn_of_abandoned_locks(here)
    assert lock.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_abandoned_locks({**here, "LOCAL_RANK": "1"})


def test_the_lock_of_a_running_build_is_kept(lock: Path, tmp_path: Path) -> None:
    """The process that holds the lock has the file open."""
    holder = subprocess.Popen([sys.executable, "-c", f"f = open({str(lock)!r}); print(flush=True); input()"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert abandoned_locks(here) == []
    holder.kill()
    holder.communicate()
    assert abandoned_locks(here) == [lock]


def test_run_says_it_before_anything_is_started(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(os, "execv", lambda *given: (_ for _ in ()).throw(SystemExit(0)))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(SystemExit):
        cli.main(["run", "--launcher", "none", "train.py"])
    assert f"type: rm {lock}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "--clear-locks", "--launcher", "none", "train.py"])
    assert f"{lock}: removed" in capsys.readouterr().err
    assert not lock.exists()


def test_a_lock_next_to_a_running_compiler_is_kept(lock: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=lock.parent) as compiler:
        assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
        compiler.kill()
    assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [lock]


@pytest.mark.parametrize(
    ("hours", "every", "removed"), [(1, False, False), (3, False, True), (1, True, True), (0, True, True)]
)
def test_only_stale_locks_are_removed_without_being_asked(
    hours: int, every: bool, removed: bool, lock: Path, tmp_path: Path
) -> None:
    then = time.time() - 3600 * hours
    os.utime(lock, (then, then))
    printed: list[str] = []
    clear_locks(every, printed.append, {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert lock.exists() is not removed
    assert ["removed" in text for text in printed] == [removed]
    assert all(str(lock) in text for text in printed)


def test_a_lock_that_is_held_is_not_removed_when_asked(lock: Path, tmp_path: Path) -> None:
    with lock.open():
        clear_locks(True, pytest.fail, {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert lock.exists()


def test_the_module_is_a_command(lock: Path, tmp_path: Path) -> None:
    """The quickstart runs the module as a command."""
    command = ("-m", "deepspeed_compress.backends.deepspeed.builds")
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    errors = run_python(*command, check=True, env=environment).stderr
    assert f"type: rm {lock}" in errors
    errors = run_python(*command, "--clear-locks", check=True, env=environment).stderr
    assert f"{lock}: removed" in errors
    assert not lock.exists()
