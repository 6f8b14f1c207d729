"""Directories of jobs: each has its own, and what was left is removed."""

import multiprocessing
from pathlib import Path

import pytest

from deepspeed_compress.launcher import directory
from deepspeed_compress.launcher.directory import job_directory

AGENTS, STARTS = 3, 300


def start_often(base: Path) -> None:
    directory._SHARED = base
    for _ in range(STARTS):
        with job_directory() as job:
            assert job.memory.is_dir()


def test_agents_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    agents = [context.Process(target=start_often, args=(tmp_path,)) for _ in range(AGENTS)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert [agent.exitcode for agent in agents] == [0] * AGENTS
    assert list(tmp_path.iterdir()) == []


def test_what_an_agent_left_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_SHARED", tmp_path)
    left = tmp_path / "ds_compress_left"
    left.mkdir()
    (left / "lock").touch()
    with job_directory():
        assert not left.exists()
