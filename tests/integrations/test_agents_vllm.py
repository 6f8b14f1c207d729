"""Training of an agent with rollouts from a real vLLM server. `.ci/vllm.sh` installs what it needs, and runs this."""

import json
from pathlib import Path

import pytest

from tests.agents.test_train_agents import MARK, marked
from tests.support.hosts import needs_vllm

pytestmark = needs_vllm("agentlightning", "matplotlib")


def test_rollouts_of_a_vllm_server_train_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.train_agents import main

    monkeypatch.setenv(MARK, str(tmp_path))
    output = tmp_path / "run"
    options = ["--output-dir", str(output), "--server", "vllm", "--supervised-steps", "100", "--tasks", "8"]
    main([*options, "--batches", "3", "--checkpoint-every", "1"])
    assert not marked(str(tmp_path))
    main([*options, "--batches", "4", "--checkpoint-every", "1", "--resume"])
    assert not marked(str(tmp_path))
    rows = [json.loads(line) for line in (output / "figures.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert [row["version"] for row in rows] == [2, 3, 4, 5]
    assert all(row["samples"] == 64 and row["failed"] == row["outdated"] == 0 for row in rows)
    assert all(row["learned"]["lag"] <= 1 for row in rows)
    assert rows[0]["learned"]["lag"] == 0
