"""The training program, started by the deepspeed launcher with two ranks on the CPU."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_configs import DROPPING_GPT2
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
MODEL = {**DROPPING_GPT2, "n_layer": 1, "resid_pdrop": 0.1}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1_000_000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}},
    "zero_optimization": {"stage": 2},
    "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4, "block_size": 32}},
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("the king said nothing, for who would answer him?\n" * 400)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    values = {
        "deepspeed_config": "ds.json",
        "data": "text.txt",
        "model": "model.json",
        "tokenizer": "tokenizer",
    }
    paths = [part for name, file in values.items() for part in (f"--{name}", str(tmp_path / file))]
    counts = "--steps 6 --seq-len 16 --eval-every 3 --eval-batches 2 --save-every 3 --log-every 1"
    return [*paths, *counts.split()]


def launch(port: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    runner = ("deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port)
    return run_python("-m", *runner, ROOT / "launch" / "train_gpt.py", *arguments, env=environment)


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times, which differ between runs."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "step_time_s"} for line in read]


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested dicts and lists, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from tensors(part, f"{path}/{name}")


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "checkpoints" / "global_step6").glob("*.pt"))
    return {
        f"{file.name}{path}": tensor
        for file in files
        for path, tensor in tensors(torch.load(file, map_location="cpu", weights_only=False))
    }


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(arguments: list[str], port: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    process = launch(port, *arguments, "--output-dir", str(whole))
    assert process.returncode == 0, process.stdout + process.stderr
    stop_after_step_3(whole, resumed)
    process = launch(port, *arguments, "--output-dir", str(resumed), "--resume")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "resuming after step 3" in process.stdout

    assert lines(resumed) == lines(whole)
    ours, theirs = checkpoint(resumed), checkpoint(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    check_summary(json.loads((resumed / "summary.json").read_text()))


def stop_after_step_3(whole: Path, stopped: Path) -> None:
    """Make `stopped` the directory of a run that was killed during its fifth step."""
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "global_step6")
    (stopped / "checkpoints" / "latest").write_text("global_step3")
    (stopped / "summary.json").unlink()
    kept = [line for line in (whole / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] < 5]
    (stopped / "metrics.jsonl").write_text("\n".join(kept) + "\n")


def check_summary(summary: dict[str, Any]) -> None:
    assert summary["world_size"] == 2
    assert summary["tokens_per_step"] == 2 * 2 * 2 * 16
    assert summary["bytes_uncompressed_per_step"] > 4 * summary["bytes_sent_per_step"]


@pytest.mark.slow
def test_a_missing_corpus_is_a_line_of_each_rank_with_status_2(arguments: list[str], port: str, tmp_path: Path) -> None:
    process = launch(port, *arguments, "--output-dir", str(tmp_path / "run"), "--data", str(tmp_path / "nowhere"))
    assert process.returncode == 2
    output = process.stdout + process.stderr
    assert output.count(f"error: --data {tmp_path / 'nowhere'}: neither a .txt or .jsonl file") == 2
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
