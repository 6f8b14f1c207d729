"""The command with synthetic trials: its files, when it continues, and when it refuses to."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.lint.runner import lint_text
from deepspeed_compress.tools.tune.search import Result, Rung
from deepspeed_compress.tools.tune.space import BASELINE, Candidate
from deepspeed_compress.tools.tune.trials import Trials
from tests.tools.tune.results import BASE, result

FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2},
}
GOOD = {
    BASELINE: BASE,
    "blockwise4": result("blockwise4", 0.001, 40, 130),
    "blockwise8": result("blockwise8", 0.0, 50, 250),
    "sign": result("sign", 0.3, 30, 40),
    "powersgd4": Result("powersgd4", "failed", error="RuntimeError: [no]", tail=("RuntimeError: [no]",)),
}
Tune = Callable[..., int]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run the command in `tmp_path`. Candidates without a result of their own are slow."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(FILE))
    for script in ("train.py", "other.py"):
        Path(script).touch()

    def call(*options: str, results: Mapping[str, Result] = GOOD, script: str = "train.py") -> int:
        def run(self: Trials, candidate: Candidate, rung: Rung, seconds: float) -> Result:
            return results.get(candidate.name, result(candidate.name, 0.0, 500, 500))

        monkeypatch.setattr(Trials, "run", run)
        return main(["tune", "--config", "ds.json", *options, "--num_gpus", "2", script, "--deepspeed", "ds.json"])

    return call


def read(name: str) -> Any:
    return json.loads(Path("tuning_results", name).read_text())


def test_the_written_files(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune() == 0
    optimal = read("ds_config_optimal.json")
    section = {"gradients": {"method": "blockwise", "bits": 4}, "weights": {"method": "none"}}
    assert optimal == {**FILE, SECTION: section}
    assert find_problems(optimal) == []
    file = Path("tuning_results/ds_config_optimal.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert lint_text(file.read_text()) == []
    out = capsys.readouterr().out
    line = Path("tuning_results/cmd_optimal.txt").read_text()
    assert line == "ds-compress run --num_gpus 2 train.py --deepspeed tuning_results/ds_config_optimal.json\n"
    assert line in out
    assert "  powersgd4             failed: RuntimeError: [no]" in out
    assert "left out: demo: /optimizer/params/betas" in out
    assert "Best: blockwise4 (blockwise bits=4): 2.50 times as fast, 7.7 times fewer bytes, loss gap +0.10%" in out


def test_the_summary(tune: Tune) -> None:
    tune()
    summary = read("summary.json")
    assert summary["best"]["name"] == "blockwise4"
    assert [len(rung["trials"]) for rung in summary["rungs"]] == [10, 3, 3]
    assert summary["target_loss_gap"] == 0.005
    rows = {row["name"]: row for row in summary["rows"]}
    assert list(rows)[:2] == ["blockwise4", BASELINE]
    assert (rows["blockwise4"]["rung"], rows["blockwise4"]["steps"]) == (3, 270)
    assert (rows["blockwise4"]["speed"], rows["blockwise4"]["remark"]) == (2.5, "best")
    assert rows["sign"]["remark"] == "loss gap +30.00% is above 2.00%"
    assert rows["bf16"]["remark"] == "5.00 times the step_time of uncompressed training"
    assert rows["powersgd4"]["remark"] == "RuntimeError: [no]"
    assert rows["powersgd4"]["gap"] is None
    assert {left["name"] for left in summary["left_out"]} == {"demo"}


def test_nothing_is_better(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(results={BASELINE: BASE}) == 0
    optimal = read("ds_config_optimal.json")
    assert optimal[SECTION] == {"gradients": {"method": "none"}, "weights": {"method": "none"}}
    assert lint_text(json.dumps(optimal)) == []
    conclusion = "No candidate is faster than uncompressed training with a loss gap of at most 0.50%"
    assert conclusion in capsys.readouterr().out


def test_the_metric_decides(tune: Tune) -> None:
    assert tune("--metric", "bytes", "--target-loss-gap", "10%") == 0
    assert read("summary.json")["best"]["name"] == "blockwise4"
    assert tune("--metric", "bytes", "--target-loss-gap", "40%") == 0
    assert read("summary.json")["best"]["name"] == "sign"


def test_a_baseline_that_fails_ends_it_with_its_log(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    failed = Result(BASELINE, "failed", error="KeyError: 'x'", tail=("line before", "KeyError: 'x'"))
    assert tune(results={BASELINE: failed}) == 1
    out = capsys.readouterr().out
    assert "Ended early: uncompressed training failed in rung 1." in out
    assert "  line before\n  KeyError: 'x'\nuncompressed training failed: KeyError: 'x'" in out
    assert not Path("tuning_results/ds_config_optimal.json").exists()
    assert read("summary.json")["stopped"] == "uncompressed training failed in rung 1"


def test_a_directory_of_something_else_is_refused(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("")
    assert tune("--output", "mine") == 1
    assert "--output mine: holds something else" in capsys.readouterr().err
    assert [path.name for path in Path("mine").iterdir()] == ["notes"]


def test_errors_are_reported_before_the_first_trial(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text(json.dumps(FILE))
    assert main(["tune", "--config", "other.json", "train.py", "--deepspeed", "ds.json"]) == 1
    assert "no argument of the command names this file" in capsys.readouterr().err
    Path("ds.json").write_text(json.dumps({**FILE, SECTION: {"gradients": {"bits": 5}}}))
    assert tune() == 1
    assert f"/{SECTION}/gradients/bits: 5" in capsys.readouterr().err
    Path("ds.json").write_text(json.dumps({**FILE, SECTION: {"communication": {"max_rate": "1 Gbit/s"}}}))
    assert tune() == 1
    assert f"/{SECTION}/communication/max_rate: uncompressed trials have no such limit" in capsys.readouterr().err
    Path("ds.json").write_text(json.dumps({**FILE, "zero_optimization": {"stage": 0}}))
    Path("space.json").write_text('[{"name": "w", "weights": {"bits": 4}}]')
    assert tune("--space", "space.json") == 1
    assert "no candidate fits this file.\n  - w: " in capsys.readouterr().err
    assert tune(script="nowhere.py") == 1
    assert "nowhere.py: no such file" in capsys.readouterr().err
    assert not Path("tuning_results").exists()


def test_nothing_is_compared_with_a_baseline_that_diverges(tune: Tune, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(results={**GOOD, BASELINE: replace(BASE, loss=math.nan)}) == 0
    out = capsys.readouterr().out
    assert "The loss of uncompressed training is not finite" in out
    assert "allow a larger gap" not in out


def test_the_file_may_be_named_by_its_whole_path(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = str(tmp_path.resolve() / "ds.json")
    assert tune(results={}) == 0
    code = main(["tune", "--config", whole, "--output", "other", "--num_gpus", "2", "train.py", "--deepspeed", whole])
    assert (code, capsys.readouterr().err) == (0, "")
