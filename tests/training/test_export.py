"""--export: transformers alone loads the exported model, which has the loss of the trained one."""

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.training.data.tokens import cache_key, eval_starts, open_cache, split_windows
from deepspeed_compress.training.main import check_export, main
from tests.support.forks import run_forks
from tests.support.model_configs import LLAMA

TEXT = "the king said nothing, for who would answer him?\n"
MODEL = {**LLAMA, "intermediate_size": 48}


def arguments(directory: Path, parallelism: dict[str, int], *more: str) -> list[str]:
    """Return the arguments of a run that reads and writes below `directory`."""
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "deepspeed_compress": {"parallelism": parallelism, "gradients": {"bits": 4, "block_size": 32}},
    }
    (directory / "text.txt").write_text(TEXT * 400)
    (directory / "model.json").write_text(json.dumps(MODEL))
    (directory / "ds.json").write_text(json.dumps(ds_config))
    files = {"deepspeed_config": "ds.json", "data": "text.txt", "model": "model.json", "output-dir": "run"}
    paths = [part for name, file in files.items() for part in (f"--{name}", str(directory / file))]
    counts = "--steps 20 --seq-len 16 --eval-batches 2 --eval-every 0"
    return [*paths, *counts.split(), "--export", str(directory / "model"), *more]


def train(rank: int, argv: list[str]) -> tuple[int, str]:
    """Run the program; return its exit status and its standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main(argv)
    return status, printed.getvalue()


def loaded(directory: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer, loaded by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)


def held_out_loss(model: Any, directory: Path, summary: dict[str, Any]) -> float:
    """Return the loss of a transformers model on the windows that the run has evaluated."""
    tokenizer = directory / "run" / "tokenizer"
    cache = open_cache(tokenizer / "tokens", cache_key([directory / "text.txt"], tokenizer))
    windows = split_windows(cache, summary["seq_len"], held_out=0.05)[1]
    starts = eval_starts(windows, 2, summary["tokens_per_step"] // summary["seq_len"])
    tokens = torch.from_numpy(windows.read(starts.reshape(-1)))
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


def threads_of_groups(rank: int, argv: list[str]) -> tuple[int, list[str]]:
    """Run the program; return its exit status and the names of gloo's threads that are still alive."""
    status, _ = train(rank, argv)
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return status, [name for name in names if "gloo" in name]


@pytest.mark.parametrize("weights", [{}, {"weights": {"method": "sign"}}], ids=["gradients", "weights"])
def test_no_gloo_thread_outlives_the_program(weights: dict[str, Any], tmp_path: Path) -> None:
    """A living thread may abort the process at exit, although the program has succeeded."""
    argv = arguments(tmp_path, {"zero_stage": 1})
    file = tmp_path / "ds.json"
    ds_config = json.loads(file.read_text())
    ds_config["deepspeed_compress"] |= weights
    file.write_text(json.dumps(ds_config))
    assert run_forks(2, threads_of_groups, [*argv, "--steps", "2"]) == [(0, [])] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [(2, {"zero_stage": 3}), (4, {"zero_stage": 1, "pipeline": 2}), (4, {"zero_stage": 1, "tensor": 2, "pipeline": 2})],
    ids=["zero3", "pipeline", "pipeline-tensor"],
)
def test_transformers_loads_the_trained_model(ranks: int, parallelism: dict[str, int], tmp_path: Path) -> None:
    results = run_forks(ranks, train, arguments(tmp_path, parallelism))
    assert [status for status, _ in results] == [0] * ranks
    model, tokenizer = loaded(tmp_path / "model")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["export"] == str(tmp_path / "model")
    # The loss of a new model is about ln 300 = 5.7.
    assert summary["eval_loss"] < 5
    # Sums are in another order. A model with lost updates would differ in the first digits.
    assert held_out_loss(model, tmp_path, summary) == pytest.approx(summary["eval_loss"], rel=1e-5)
    assert tokenizer.eos_token == "<|endoftext|>"
    words = model.generate(tokenizer("the king", return_tensors="pt").input_ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(words[0]).startswith("the king")


def options_with(**values: Any) -> Any:
    return argparse.Namespace(**{"export": None, "model": Path("model.json"), "resume": False} | values)


def holds_model(directory: Path) -> Path:
    (directory / "config.json").write_text("{}")
    return directory


def holds_file(directory: Path) -> Path:
    (directory / "file").write_text("")
    return directory / "file"


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (holds_model, {}, "already holds a model; choose another directory"),
        (holds_file, {}, r"cannot be created \(.+\); choose another"),
    ],
)
def test_an_export_never_overwrites_other_files(
    prepare: Callable[[Path], Path], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_export(options_with(export=prepare(tmp_path), **options))


def test_a_resumed_run_may_overwrite_its_export_but_not_its_model(tmp_path: Path) -> None:
    check_export(options_with(export=holds_model(tmp_path), resume=True))
    with pytest.raises(ConfigError, match="would overwrite --model"):
        check_export(options_with(export=tmp_path, model=tmp_path, resume=True))


def test_without_the_option_nothing_is_created(tmp_path: Path) -> None:
    check_export(options_with(model=tmp_path))
    assert list(tmp_path.iterdir()) == []
