import json
from pathlib import Path

import pytest

from deepspeed_compress.errors import CompressWarning, ConfigError, DataError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.run_directory import read_lines, read_summary
from deepspeed_compress.training.output import (
    Metrics,
    check_new,
    final_figures,
)


def test_resuming_drops_lines_of_repeated_steps(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, visible=True)
    metrics.begin(0)
    for step in (1, 2, 3):
        metrics.add(step=step, train_loss=1.0)
    metrics.begin(2)
    metrics.add(step=3, train_loss=2.0)
    assert [(line["step"], line["train_loss"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", visible=False)
    metrics.begin(0)
    metrics.add(step=1)
    assert not (tmp_path / "run").exists()


def test_a_line_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    """An error on the writing rank would leave the other ranks waiting."""
    metrics = Metrics(tmp_path / "run", visible=True)
    metrics.begin(0)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run").rmdir()
    with pytest.warns(CompressWarning, match=r"metrics\.jsonl cannot be written"):
        metrics.add(step=1)
    metrics.add(step=2)


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    check_new(tmp_path)
    Metrics(tmp_path, visible=True).begin(0)
    with pytest.raises(ConfigError, match="already holds a run; pass --resume"):
        check_new(tmp_path)


def test_final_figures_are_medians_and_means(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, visible=True)
    metrics.begin(0)
    for step, seconds in ((1, 9.0), (2, 2.0), (3, 2.0)):
        metrics.add(step=step, train_loss=1.0, step_time_s=seconds)
    metrics.add(step=3, eval_loss=0.5)
    lines = [{"step": step, "bytes_sent": 10, "bytes_uncompressed": 80} for step in (1, 2)]
    (tmp_path / "compression.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert final_figures(tmp_path, tmp_path, batch_tokens=100) == {
        "eval_loss": 0.5,
        "median_step_s": 2.0,
        "tokens_per_s": 50.0,
        "bytes_sent_per_step": 10,
        "bytes_uncompressed_per_step": 80,
    }


def test_a_line_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st')
    assert read_lines(file) == [{"step": 1}]
    file.write_bytes(b'{"step": 1}\n\xff\xfe')
    assert read_lines(file) == [{"step": 1}]
    for damaged in (b'{"st', b"\xff\xfe"):
        file.write_bytes(damaged + b'\n{"step": 1}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl:1: not JSON"):
            read_lines(file)


def test_a_summary_is_read_back_and_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no summary\.json"):
        read_summary(tmp_path)
    write_json(tmp_path / "summary.json", {"steps": 3})
    assert read_summary(tmp_path) == {"steps": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_summary(tmp_path)


def test_steps_before_a_resume_that_were_repeated_do_not_count(tmp_path: Path) -> None:
    """A resumed program drops these lines itself, unless it is killed before it can."""
    times = [(1, 1.0), (2, 1.0), (3, 90.0), (4, 90.0), (3, 2.0)]
    lines = [{"step": step, "step_time_s": seconds} for step, seconds in times]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert final_figures(tmp_path, tmp_path, 10)["median_step_s"] == 1.0
