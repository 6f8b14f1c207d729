"""The whole command with two ranks and DeepSpeed's launcher, on a script that does not know of this package."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.tools.tune.space import BASELINE
from tests.support.processes import run_command

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).parent / "script.py")
SPACE = [
    {"name": "int4", "gradients": {"bits": 4}},
    # The file does not tell that the script has an optimizer with momentum, so this candidate fails at attach.
    {"name": "demo", "gradients": {"method": "demo"}},
]


def tune(directory: Path, port: str) -> str:
    """Return the output of a successful command."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    own = "--config ds.json --space space.json --rungs 1 --steps 10 --metric bytes --target-loss-gap 50%"
    script = [SCRIPT, "ds.json", "--output_dir", "runs", "--own-optimizer"]
    start = ("--num_gpus", "2", "--master_port", port)
    done = run_command("tune", *own.split(), *start, *script, cwd=directory, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.serial
def test_a_real_search(port: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    output = tune(tmp_path, port)
    results = tmp_path / "tuning_results"
    [rung] = json.loads((results / "summary.json").read_text())["rungs"]
    trials = {trial["name"]: trial for trial in rung["trials"]}
    assert {name: trial["status"] for name, trial in trials.items()} == {
        BASELINE: "finished",
        "int4": "finished",
        "demo": "failed",
    }
    assert "UnsupportedError" in trials["demo"]["error"]
    assert trials["int4"]["bytes"] < trials[BASELINE]["bytes"]
    assert trials["int4"]["loss"] == pytest.approx(trials[BASELINE]["loss"], rel=0.2)
    assert trials["int4"]["loss"] != trials[BASELINE]["loss"]
    assert json.loads((results / "ds_config_optimal.json").read_text())[SECTION]["gradients"]["bits"] == 4
    assert "Best: int4" in output
    assert not (tmp_path / "runs").exists()
    assert json.loads((tmp_path / "ds.json").read_text()) == config
    finished = {path.name: path.stat().st_mtime_ns for path in (results / "exps").glob("*/trial.jsonl")}
    again = tune(tmp_path, port)
    assert again.count("from before") == 2
    assert {path.name: path.stat().st_mtime_ns for path in (results / "exps").glob("*/trial.jsonl")} == finished
