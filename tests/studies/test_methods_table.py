"""The comparison of all methods: its settings, its training runs, and the figures computed from them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.training.data.tokens import open_cache, split_windows, step_starts
from launch.studies import methods_lab, methods_table
from launch.studies.harness import markdown
from launch.studies.methods_lab import Rank, Spec, StepRecord, train
from launch.studies.methods_settings import ADAM, SETTINGS
from launch.studies.methods_table import HEAD, cells, table_rows
from tests.studies.toy import MODEL, ToyFiles
from tests.support.processes import run_python
from tests.support.sections import OF_WEIGHTS

SAMPLED = pytest.mark.sampled(12)

ROOT = Path(__file__).parents[2]
STEPS, RANKS = 3, 3


class Lab(ToyFiles):
    """Files of a model whose width suits no block size, and windows of its tokens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {**MODEL, "n_embd": 36})
        self.windows, _ = split_windows(open_cache(self.cache, self.key), 16, methods_lab.HELD_OUT)

    def spec(self, name: str) -> Spec:
        """Return the specification of a run with the setting `name`, without its dense start."""
        section: dict[str, Any] = {
            key: SETTINGS[name][key] for key in ("gradients", "weights") if key in SETTINGS[name]
        }
        model = methods_lab.digest(self.model)
        return Spec(section, SETTINGS[name].get("betas", ADAM), 1, STEPS, RANKS, 2, 16, model, self.key)

    def build(self) -> Any:
        return build_model(self.model, read_model_config(self.model), 1)

    def train(self, name: str) -> list[tuple[Rank, list[StepRecord]]]:
        return train(self.spec(name), self.windows, [self.build() for _ in range(RANKS)])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def test_every_method_has_a_setting() -> None:
    sections = [parse_section({SECTION: _section(setting)}) for setting in SETTINGS.values()]
    assert {section.gradients.method for section in sections} == set(
        json_schema()["properties"]["gradients"]["discriminator"]["mapping"]
    )
    assert {section.weights.method for section in sections} == {"none", *OF_WEIGHTS}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_sound(name: str) -> None:
    """Methods with their own momentum must have an optimizer without one, among others."""
    setting = SETTINGS[name]
    optimizer = {"type": "AdamW", "params": {"betas": list(setting.get("betas", ADAM))}}
    config = {"optimizer": optimizer, "zero_optimization": {"stage": 1}, SECTION: _section(setting)}
    assert find_problems(config, 4) == []
    assert ("weights" in setting) == ("+" in name)


def _section(setting: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in setting.items() if key != "betas"}


def test_without_compression_it_is_adamw_on_the_mean_gradient(lab: Lab) -> None:
    ranks = [rank for rank, _ in lab.train("none")]
    masters, gradients = _plain_training(lab)
    own = [rank.master.grad for rank in ranks]
    torch.testing.assert_close(torch.cat([grad for grad in own if grad is not None]), gradients, rtol=1e-4, atol=1e-7)
    difference = torch.cat([rank.master for rank in ranks]).sub(masters).abs()
    # The sums have another order, and Adam amplifies the rounding errors of gradients that are nearly zero.
    assert difference.mean() < 1e-8
    assert difference.max() < 1e-5
    assert all(torch.equal(rank.held, torch.cat([r.master for r in ranks]).to(torch.bfloat16)) for rank in ranks)


def _plain_training(lab: Lab) -> tuple[Tensor, Tensor]:
    """Train one model on all batches with torch alone.

    Returns the master weights, and the clipped gradient of the last step.
    """
    spec, model = lab.spec("none"), lab.build()
    parameters = list(model.parameters())
    masters = [parameter.detach().bfloat16().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.bfloat16())
        model.zero_grad()
        tokens = torch.from_numpy(lab.windows.read(step_starts(lab.windows, RANKS * 2, 1, step)))
        for part in tokens.view(RANKS, 2, 16):
            (model(input_ids=part, labels=part).loss / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad
        optimizer.param_groups[0]["lr"] = spec.learning_rate(step)
        optimizer.step()
    gradients = [parameter.grad.reshape(-1) for parameter in parameters]
    return torch.cat([master.reshape(-1) for master in masters]), torch.cat(gradients)


def result(loss: float, gradients: float = 4.0) -> dict[str, float]:
    return {
        "eval_loss": loss,
        "bits_gradients": gradients,
        "bits_weights": 16.0,
        "bits_with_warmup": 21.0,
        "compress_ms": 1.0,
        "decompress_ms": 2.0,
    }


def test_the_table_compares_equal_seeds() -> None:
    rows = table_rows(
        {"none": {0: result(2.0, 32.0), 1: result(4.0, 32.0)}, "a": {0: result(2.02), 1: result(4.12)}, "b": {}}
    )
    assert [row.name for row in rows] == ["a", "none"]
    assert list(rows[0].gaps) == pytest.approx([1, 3])
    assert cells(rows[0]) == [
        "a", "4.000", "16.000", "2.4x", "21.000", "+2.00 ± 1.41 %", "2", "1.0", "2.0",
    ]  # fmt: skip
    lines = markdown(HEAD, map(cells, rows)).splitlines()
    assert [line.count("|") for line in lines] == [10] * 4
    assert lines[3].startswith("| none | 32.000 | 16.000 | 1.0x |")


@pytest.mark.slow
def test_the_program_runs_missing_settings_and_names_failures(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    arguments = ["--data", str(lab.text), "--output-dir", str(tmp_path), "--model", str(lab.model)]
    arguments += ["--ranks", "2", "--seq-len", "16", "--steps"]
    program = ("-m", "launch.studies.methods_table", *arguments, "2", "--only", "^(int4|demo-1%)$")
    first = run_python(*program, cwd=ROOT)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "demo-1%, seed 0: ValueError: all 2 steps are among the 20 " in first.stdout
    runs = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("seed0.json")}
    assert {file.parent.name for file in runs} == {"none", "int4"}
    written = (tmp_path / "table.md").read_text()
    assert len(written.splitlines()) == 4
    assert methods_table.main([*arguments, "2", "--only", "^int4$"]) == 0
    assert (tmp_path / "table.md").read_text() == written
    assert {file: file.stat().st_mtime_ns for file in runs} == runs
    assert methods_table.main([*arguments, "3"]) == 2
    assert "made with another steps" in capsys.readouterr().err
