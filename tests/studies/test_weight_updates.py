"""The studies of weight updates: simple updates that exact ones are compared with, and the rows of the tables."""

from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_compress.rollout import DirectoryStore
from launch.studies import agent_rewards, version_costs
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


@pytest.mark.slow
def test_runs_of_some_seconds_have_a_table_and_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    modes, seeds = ["synchronous-whole", "one-behind"], ["0", "1"]
    sizes = ["--width", "32", "--layers", "2", "--start", "0.1", "--seconds", "5"]
    agent_rewards.main(["--output-dir", str(tmp_path), "--modes", *modes, "--seeds", *seeds, *sizes])
    rows = [line.split(" | ")[0] for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["| mode", "| ---", *(f"| {mode}" for mode in modes)]
    assert (tmp_path / "rewards.png").stat().st_size > 1000


@pytest.mark.slow
def test_costs_of_versions_have_a_row_for_each_learning_rate_and_kind() -> None:
    rows = list(version_costs.rows(Path("configs/models/llama_1m.json"), [1e-6, 1e-5], versions=1))
    assert [row[0] for row in rows] == ["1e-06", "1e-05", "", "1e-05"]
    assert {len(row) for row in rows} == {len(version_costs.COLUMNS)}
    sizes = [float(row[version_costs.COLUMNS.index("MB")]) for row in rows]
    assert sizes[0] < sizes[1] < sizes[2]
