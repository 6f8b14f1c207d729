"""Compression figures in the logs of Trainer and in reporters."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.integrations import hf
from deepspeed_compress.integrations.trainer_callback import log_entries
from deepspeed_compress.monitor import StepStatistics
from tests.integrations.trainers import INT4, Job, forget_accelerate, train, trainer_of
from tests.support.forks import run_forks

NAMES = {"ratio", "bytes_sent", "bytes_weights", "time_ms", "residual_norm"}
ENTRIES = {f"compression_{name}" for name in NAMES}


def step(**figures: Any) -> StepStatistics:
    kinds = dict.fromkeys(("bytes_raw", "bytes_weights", "bytes_pipeline", "bytes_tied", "bytes_tensor"), 0)
    times = dict.fromkeys(("compress_ms", "communicate_ms", "decompress_ms"), 1.0)
    base: dict[str, Any] = {
        "step": 1,
        "samples": 4,
        "method": "blockwise",
        "rank": 0,
        "bytes_sent": 10,
        **kinds,
        **times,
    }
    base |= {
        "bytes_uncompressed": 40,
        "bytes_weights_saved": 0,
        "total_ratio": None,
        "ratio": 4.0,
        "residual_norm": None,
        "cosine": None,
    }
    return StepStatistics(**{**base, **figures})


def test_log_entries_are_means_or_the_newest_sample() -> None:
    measured = [
        step(residual_norm=3.0, cosine=0.5, bytes_weights=10, total_ratio=5.0),
        step(
            bytes_sent=30, bytes_uncompressed=40, residual_norm=2.0, compress_ms=5.0, bytes_tensor=None, total_ratio=1.0
        ),
    ]
    assert log_entries(measured) == {
        "compression_total_ratio": 2.6,
        "compression_ratio": 2.0,
        "compression_bytes_sent": 20.0,
        "compression_bytes_weights": 5.0,
        "compression_time_ms": 5.0,
        "compression_residual_norm": 2.0,
        "compression_cosine": 0.5,
    }


def test_steps_that_send_nothing_have_no_ratio() -> None:
    entries = log_entries([step(bytes_sent=0, bytes_uncompressed=0)])
    assert entries == {"compression_bytes_sent": 0.0, "compression_time_ms": 3.0}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2, "max_steps": 6}


def test_only_training_logs_with_measured_steps_have_figures(tmp_path: Path) -> None:
    """Every third step is measured, and every second one is logged."""
    section = {**INT4, "monitor": {"every": 3}}
    first, second = (one[0] for one in run_forks(2, train, Job(str(tmp_path), 2, section, EVALUATED)))
    steps = [entry["step"] for entry in first.logs if entry.keys() >= ENTRIES]
    assert steps == [4, 6]
    assert all(not any("compression" in key for key in entry) for entry in first.logs if entry["step"] not in steps)
    assert all(not any("compression" in key for key in entry) for entry in first.logs if "loss" not in entry)
    assert not any("compression" in key for entry in second.logs for key in entry)


def test_a_save_does_not_change_the_figures_of_steps(tmp_path: Path) -> None:
    """Exact weights are sent before a checkpoint. They are logged apart from compressed ones."""
    args = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    first = run_forks(2, train, Job(str(tmp_path), 2, {**INT4, "weights": {"bits": 4}}, args))[0][0]
    assert len(set(first.of("compression_bytes_weights"))) == 1
    assert len(set(first.of("compression_total_ratio"))) == 1
    # Saves are after steps 2, 4 and 6, and each is counted in the step after it.
    saved = [entry.get("compression_bytes_exact", 0) > 0 for entry in first.logs if "loss" in entry]
    assert saved == [False, False, True, False, True, False]


def test_logged_figures_match_the_statistics_file(tmp_path: Path) -> None:
    section = {**INT4, "monitor": {"path": str(tmp_path)}}
    first = run_forks(2, train, Job(str(tmp_path), 2, section, {"logging_steps": 2}))[0][0]
    lines = [json.loads(line) for line in (tmp_path / "compression.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert first.of("compression_residual_norm") == [lines[1]["residual_norm"], lines[3]["residual_norm"]]
    assert first.of("compression_ratio") == [pytest.approx(line["ratio"]) for line in lines[1::2]]


def test_reporters_of_trainer_and_deepspeed_get_the_figures(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}
    args = {"report_to": "tensorboard"}
    run_forks(2, train, Job(str(tmp_path), 2, INT4, args, {"csv_monitor": monitor}))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = [path.parent for path in tmp_path.rglob("events.out.tfevents.*")]
    board = EventAccumulator(str(events)).Reload()
    assert {f"train/{name}" for name in ENTRIES} <= set(board.Tags()["scalars"])
    assert [scalar.step for scalar in board.Scalars("train/compression_ratio")] == [1, 2, 3, 4]
    tables = {path.name for path in (tmp_path / "csv").rglob("*.csv")}
    assert {f"Train_Samples_{name}.csv" for name in ENTRIES} <= tables


class Spy(TrainerCallback):  # type: ignore[misc]
    """Callback that was added before ours."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.seen.append(set(logs))


def by_attach(rank: int, job: Job) -> Any:
    """Train after `attach` instead of `install`; return the keys of the logs that another callback sees."""
    trainer, spy = trainer_of(job), Spy()
    trainer.add_callback(spy)
    assert hf.attach(trainer) is trainer
    assert hf.attach(trainer) is trainer
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(hf.CompressionCallback) == 1
    assert kinds[0] is hf.CompressionCallback
    trainer.train()
    assert trainer.model_wrapped.compression.config.gradients.bits == 4
    return spy.seen


def test_attach_logs_figures_and_adds_one_callback(tmp_path: Path) -> None:
    seen = run_forks(2, by_attach, Job(str(tmp_path), 2, INT4, {"max_steps": 2}))[0]
    assert [names >= ENTRIES for names in seen] == [True, True, False]


def has_callback(rank: int, job: Job) -> list[bool]:
    """Return whether a Trainer has our callback: after `install`, without a section, and after undoing `install`."""
    found = []
    for section in (job.section, None):
        uninstall = deepspeed_compress.install()
        trainer = trainer_of(replace(job, section=section))
        found.append(isinstance(trainer.callback_handler.callbacks[0], hf.CompressionCallback))
        uninstall()
        forget_accelerate()
    trainer = trainer_of(job)
    return [*found, isinstance(trainer.callback_handler.callbacks[0], hf.CompressionCallback)]


def test_install_can_be_undone(tmp_path: Path) -> None:
    assert run_forks(1, has_callback, Job(str(tmp_path), 2, INT4)) == [[True, False, False]]


def test_attach_needs_deepspeed_and_a_section() -> None:
    plain = SimpleNamespace(args=SimpleNamespace(deepspeed_plugin=None), model=None)
    with pytest.raises(deepspeed_compress.ConfigError, match=r"TrainingArguments\(deepspeed="):
        hf.attach(plain)
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={}))
    with pytest.raises(deepspeed_compress.ConfigError, match=f"/{SECTION}: the section is missing"):
        hf.attach(SimpleNamespace(args=SimpleNamespace(deepspeed_plugin=plugin), model=None))
