"""Job directories: each job has its own, and abandoned ones are removed."""

import multiprocessing
from pathlib import Path

import pytest

from deepspeed_compress.launcher import host_resources
from deepspeed_compress.launcher.host_resources import job_directory

AGENTS, STARTS = 3, 300


def start_often(base: Path) -> None:
    host_resources._SHARED_MEMORY = base
    for _ in range(STARTS):
        with job_directory() as job:
            assert job.is_dir()


def test_concurrent_agents_do_not_remove_each_others_directories(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    agents = [context.Process(target=start_often, args=(tmp_path,)) for _ in range(AGENTS)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert [agent.exitcode for agent in agents] == [0] * AGENTS
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_agent_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_resources, "_SHARED_MEMORY", tmp_path)
    left = tmp_path / "ds_compress_left"
    left.mkdir()
    (left / "lock").touch()
    with job_directory():
        assert not left.exists()
