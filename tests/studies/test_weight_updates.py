"""The studies of weight updates: simple updates that exact ones are compared with, and the rows of the tables."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_compress.rollout import DirectoryStore
from launch.studies import agent_rewards
from launch.studies.agent_rewards import Row
from launch.studies.plain_updates import CODINGS, PlainPublisher, PlainReceiver


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Linear(33, 5))


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize(("every", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_simple_updates_are_exact_too(name: str, every: int, dtype: torch.dtype, tmp_path: Path) -> None:
    trained, received, store = model(), model().to(dtype), DirectoryStore(tmp_path)
    publisher = PlainPublisher(trained, store, CODINGS[name])
    receiver = PlainReceiver(received, store, CODINGS[name])
    assert not receiver.update()
    for version in range(1, 7):
        publisher.publish()
        publisher.wait()
        if version % every == 0:
            assert receiver.update()
            assert not receiver.update()
            with receiver.request() as held:
                assert held == version
            for own, theirs in zip(received.parameters(), trained.parameters(), strict=True):
                assert torch.equal(own.to(torch.bfloat16), theirs.to(torch.bfloat16))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
    assert len(publisher.sizes) == 6


def test_the_row_of_a_mode_has_means_over_its_runs() -> None:
    runs = [[Row(pace * number, 0.1 * number, 1.0, 1000) for number in range(1, 11)] for pace in (1.0, 3.0)]
    found = agent_rewards.cells("asynchronous", runs, goal=0.45)
    assert found == ["asynchronous", "10", "2.00", "1", "1.00", "0.950", "16 (8 to 24)"]
    assert agent_rewards.cells("asynchronous", runs[:1], goal=0.45)[-1] == "8"
    assert agent_rewards.cells("asynchronous", runs, goal=0.9)[-1] == ""


def test_all_seeds_begin_with_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--width", "32", "--layers", "2", "--start", "0.1"]
    options = agent_rewards.parse_options(["--output-dir", str(tmp_path), *sizes])
    file = agent_rewards.taught(options)
    monkeypatch.setattr(agent_rewards, "teach", None)
    assert agent_rewards.taught(options) == file
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert re.match(r"Before the first batch, the reward is 0\.1\d\. Whole bf16 weights have 53 kB, .* 0\.00 s", first)
    task, answers, weights = [agent_rewards.Sum(1, 2)] * 8, [], []
    for seed in (0, 1):
        model = agent_rewards.load(options, file, seed)
        weights.append(model.state_dict())
        answers.append(agent_rewards.answers(model, task))
    assert all(torch.equal(weights[0][name], values) for name, values in weights[1].items())
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_runs_of_some_seconds_have_a_table_and_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    modes, seeds = ["synchronous-whole", "one-behind"], ["0", "1"]
    sizes = ["--width", "32", "--layers", "2", "--start", "0.1", "--seconds", "5"]
    agent_rewards.main(["--output-dir", str(tmp_path), "--modes", *modes, "--seeds", *seeds, *sizes])
    rows = [line.split(" | ")[0] for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["| mode", "| ---", *(f"| {mode}" for mode in modes)]
    assert (tmp_path / "rewards.png").stat().st_size > 1000
