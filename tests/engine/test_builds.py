"""Locks that a killed build has left."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from deepspeed_compress import CompressWarning, cli
from deepspeed_compress.engine import builds
from deepspeed_compress.engine.builds import abandoned_locks, warn_of_abandoned_locks


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """An hour old, and nobody's."""
    return old(tmp_path / "cpu_adam" / "lock")


def old(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch()
    before = time.time() - 3600
    os.utime(path, (before, before))
    return path


def test_it_is_found_and_what_to_type_is_said(lock: Path, tmp_path: Path) -> None:
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with pytest.warns(CompressWarning, match=rf"{lock}: .* 60 minutes .* loads cpu_adam .* type: rm {lock}$"):
        warn_of_abandoned_locks(here)
    assert lock.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_abandoned_locks({**here, "LOCAL_RANK": "1"})


def test_it_is_found_in_the_usual_place(tmp_path: Path) -> None:
    path = old(tmp_path / "torch_extensions" / "py311_cpu" / "fused_adam" / "lock")
    assert abandoned_locks({"XDG_CACHE_HOME": str(tmp_path)}) == [path]


def test_what_is_being_built_is_left_alone(lock: Path, tmp_path: Path) -> None:
    """The holder has the file open."""
    holder = subprocess.Popen([sys.executable, "-c", f"f = open({str(lock)!r}); print(flush=True); input()"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    here = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert abandoned_locks(here) == []
    holder.kill()
    holder.communicate()
    assert abandoned_locks(here) == [lock]


def test_a_lock_that_was_just_taken_is_left_alone(lock: Path, tmp_path: Path) -> None:
    lock.touch()
    assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_no_locks_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_open_files", lambda: pytest.fail("looked at all processes"))
    assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_run_says_it_before_anything_is_started(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(os, "execv", lambda *given: (_ for _ in ()).throw(SystemExit(0)))
    with pytest.raises(SystemExit):
        cli.main(["run", "--launcher", "none", "train.py"])
    assert f"type: rm {lock}" in capsys.readouterr().err
