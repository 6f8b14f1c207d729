"""Losses with compressed gradients and activations: layouts train, and finished runs are compared and not repeated."""

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from deepspeed_compress.config.section import find_problems
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench import gauges
from launch.studies import losses
from launch.studies.harness import prepare_data
from launch.studies.loss_curve import ATTEMPTS, Curve, Run, train
from launch.studies.losses import LAYOUTS, Key, find_runs
from tests.studies.toy import ToyFiles
from tests.support.forks import run_forks
from tests.support.model_configs import LLAMA


class Study:
    """Study of a toy model."""

    def __init__(self, directory: Path) -> None:
        self.files = ToyFiles(directory, LLAMA)
        given = {"data": self.files.text, "model": self.files.model, "output-dir": directory}
        self.arguments = [text for name, path in given.items() for text in (f"--{name}", str(path))]
        self.arguments += ["--seq-len", "16", "--steps", "4"]

    def runs(self, *arguments: str) -> dict[Key, Run]:
        options = losses.parse_options([*self.arguments, *arguments])
        return dict(find_runs(options, prepare_data(options)))


def trained(rank: int, runs: list[Run], cache: Path) -> list[float]:
    gauges.join()
    jobs = [replace(run.job, eval_batches=2) for run in runs]
    return [train(job, cache, prints=False).held_out[-1][1] for job in jobs]


@pytest.mark.slow
def test_losses_are_near_that_of_deepspeed(tmp_path: Path) -> None:
    runs = Study(tmp_path).runs("--tokens", "64", "--seeds", "0", "--layouts", "tensor", "pipeline", "sequence")
    every, _ = run_forks(2, trained, [*runs.values()], tmp_path / "tokenizer" / "tokens", shared_memory=True)
    found = {(layout, setting): loss for (layout, setting, _), loss in zip(runs, every, strict=True)}
    assert found["tensor", "merged"] == pytest.approx(found["tensor", "deepspeed"], rel=1e-5)
    for (layout, setting), loss in found.items():
        plain = found[layout, "deepspeed"]
        assert loss == pytest.approx(plain, rel=1e-2)
        assert (loss != plain) == (setting in ("int8", "int4")) or setting == "merged"
        assert plain == pytest.approx(found["tensor", "deepspeed"], rel=1e-3)


def test_finished_runs_are_compared_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study(tmp_path)
    known = {"deepspeed": (2.0, 4.0, 3.0), "merged": (2.0, 4.0, 3.0), "int8": (2.1, 4.0, 3.0), "int4": (2.1, 4.2)}
    for (layout, setting, seed), run in study.runs("--layouts", "tensor", "both").items():
        if layout == "tensor" and seed < len(known[setting]):
            curve = Curve(0, (5.0,), ((4, known[setting][seed]),), gradient_bytes=(1000, 4000))
            write_json(run.file, {"job": asdict(run.job), "ranks": 2, **asdict(curve)})
    with patch.object(subprocess, "run", return_value=SimpleNamespace(returncode=1)) as started:
        assert losses.main([*study.arguments, "--layouts", "tensor", "both"]) == 1
    commands = [call.args[0] for call in started.call_args_list][::ATTEMPTS]
    jobs = [(json.loads(Path(command[-3]).read_text()), int(command[5])) for command in commands]
    left = [(job["contender"]["name"], job["workload"]["seed"], ranks) for job, ranks in jobs]
    settings = ("deepspeed", *LAYOUTS["both"].settings)
    assert [one for one in left if one[2] == 4] == [(name, seed, 4) for seed in range(3) for name in settings]
    assert [one for one in left if one[2] == 2] == [("int4", 2, 2)]
    printed = capsys.readouterr()
    rows = [re.split(" {2,}", line.strip()) for line in printed.out.splitlines() if line.strip().startswith("tensor")]
    assert rows == [
        ["tensor", "deepspeed", "2", "3.0000", "+0.00% ± 0.00%", "47.14%", "1,000"],
        ["tensor", "merged", "2", "3.0000", "+0.00% ± 0.00%", "47.14%", "1,000"],
        ["tensor", "int8", "2", "3.0500", "+2.50% ± 2.50%", "44.05%", "1,000"],
        ["tensor", "int4", "2", "3.1500", "+5.00% ± 0.00%", "47.14%", "1,000"],
    ]
    assert "both/int4-2.json: failed, see" in printed.err.replace("\n", "")
    assert losses.main([*study.arguments, "--layouts", "tensor", "--tokens", "64"]) == 2
    assert "made with another workload" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_configurations_are_valid(layout: str, tmp_path: Path) -> None:
    runs = Study(tmp_path).runs("--layouts", layout, "--seeds", "0")
    assert [setting for _, setting, _ in runs] == ["deepspeed", *LAYOUTS[layout].settings]
    compressed = [run for (_, setting, _), run in runs.items() if setting != "deepspeed"]
    assert all(not find_problems(run.job.contender.ds_config or {}, run.ranks) for run in compressed)
