"""Losses with compressed activations: all layouts train, and finished runs are compared and not repeated."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.training.output import Silent
from launch.studies import activation_loss
from launch.studies.activation_loss import LAYOUTS, Run, find_runs
from launch.studies.loss_curve import Curve, train
from tests.studies.toy import VOCABULARY, ToyFiles
from tests.support.forks import run_forks

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Study:
    """Study of a toy model."""

    def __init__(self, directory: Path) -> None:
        self.files = ToyFiles(directory, LLAMA)
        given = {"data": self.files.text, "model": self.files.model, "output-dir": directory}
        self.arguments = [text for name, path in given.items() for text in (f"--{name}", str(path))]
        self.arguments += ["--seq-len", "16", "--steps", "4"]

    def runs(self, *arguments: str) -> list[Run]:
        options = activation_loss._options([*self.arguments, *arguments])
        return list(find_runs(options, activation_loss.prepare_data(options)))


def trained(rank: int, runs: list[Run], cache: Path) -> list[float]:
    gauges.join()
    jobs = [replace(run.job, eval_batches=2) for run in runs]
    return [train(job, cache, Silent()).held_out[-1][1] for job in jobs]


@pytest.mark.slow
def test_losses_are_near_that_of_deepspeed(tmp_path: Path) -> None:
    runs = Study(tmp_path).runs("--tokens", "64", "--seeds", "0", "--layouts", "tensor", "pipeline", "sequence")
    found, _ = run_forks(2, trained, runs, tmp_path / "tokenizer" / "tokens", shared_memory=True)
    losses = {(run.layout, run.setting): loss for run, loss in zip(runs, found, strict=True)}
    assert losses["tensor", "merged"] == pytest.approx(losses["tensor", "deepspeed"], rel=1e-5)
    for (layout, setting), loss in losses.items():
        plain = losses[layout, "deepspeed"]
        assert loss == pytest.approx(plain, rel=1e-2)
        assert (loss != plain) == (setting in ("int8", "int4")) or setting == "merged"
        assert plain == pytest.approx(losses["tensor", "deepspeed"], rel=1e-3)


def test_finished_runs_are_compared_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study(tmp_path)
    losses = {"deepspeed": (2.0, 4.0, 3.0), "merged": (2.0, 4.0, 3.0), "int8": (2.1, 4.0, 3.0), "int4": (2.1, 4.2)}
    for run in study.runs("--layouts", "tensor", "both"):
        if run.layout == "tensor" and run.seed < len(losses[run.setting]):
            curve = Curve(0, (5.0,), ((4, losses[run.setting][run.seed]),))
            write_json(run.file, {"job": asdict(run.job), "ranks": 2, **asdict(curve)})
    with patch.object(activation_loss, "run_job", return_value=False) as run_job:
        assert activation_loss.main([*study.arguments, "--layouts", "tensor", "both"]) == 1
    left = [(job.contender.name, job.workload.seed, ranks) for (job, ranks, *_), _ in run_job.call_args_list]
    settings = ("deepspeed", *LAYOUTS["both"].settings)
    assert [one for one in left if one[2] == 4] == [(name, seed, 4) for seed in range(3) for name in settings]
    assert [one for one in left if one[2] == 2] == [("int4", 2, 2)]
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if "│" in line]
    assert rows == [
        ["tensor", "deepspeed", "2", "3.0000", "+0.00% ± 0.00%", "47.14%"],
        ["tensor", "merged", "2", "3.0000", "+0.00% ± 0.00%", "47.14%"],
        ["tensor", "int8", "2", "3.0500", "+2.50% ± 2.50%", "44.05%"],
        ["tensor", "int4", "2", "3.1500", "+5.00% ± 0.00%", "47.14%"],
    ]
    assert "both/int4-2.json: failed, see" in printed.err.replace("\n", "")
    assert activation_loss.main([*study.arguments, "--layouts", "tensor", "--tokens", "64"]) == 2
    assert "made with another workload" in capsys.readouterr().err
