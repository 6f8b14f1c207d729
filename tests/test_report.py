import json
import sys
from pathlib import Path

import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.report import main, write_report
from deepspeed_compress.report.runs import _distinct_names, load_runs, table_rows, traffic
from deepspeed_compress.train.records import compression_figures

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")


def finished_run(directory: Path, loss: float, sent: int | None, **kinds: int) -> Path:
    """`kinds`: means of a step by the names that summaries have for them."""
    directory.mkdir()
    metrics = [{"step": step, "train_loss": loss + 1 / step, "step_time_s": 0.1} for step in (1, 2, 3)]
    metrics.append({"step": 3, "eval_loss": loss})
    summary = {
        "eval_loss": loss,
        "median_step_s": 0.1,
        "steps": 3,
        "config": "<ds>.json",
        "sample": "a\n\n\n\nb",
    }
    if sent is not None:
        lines = [{"step": step, "bytes_sent": sent} for step in (1, 2, 3)]
        (directory / "compression.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary |= {"bytes_sent_per_step": sent, "compression_ratio": 8.0, **kinds}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return finished_run(tmp_path / "int4", 2.02, 1_000_000), finished_run(tmp_path / "dense", 2.0, 8_000_000)


def test_page_and_picture(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page, picture = write_report(*runs, tmp_path / "report")
    text = page.read_text(encoding="utf-8")
    assert "int4 against dense" in text
    assert "+1.00%" in text
    assert "&lt;ds&gt;.json" in text
    assert "viewport" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page, _ = write_report(*runs, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "<script src=" not in text
    assert "<link" not in text
    assert text.count("plotly.js v") == 1


def test_a_run_alone_without_compression_figures(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", 2.0, None)
    page, picture = write_report(run, None, tmp_path)
    assert "change" not in page.read_text(encoding="utf-8").split("<tbody>")[0].split("<table>")[1]
    assert picture.stat().st_size > 10_000


def test_changes_are_told_only_where_they_mean_something(runs: tuple[Path, Path]) -> None:
    rows = {row[0]: row[1:] for row in table_rows(load_runs(*runs))}
    assert rows["held-out loss"] == ["2.0000", "2.0200", "+1.00%"]
    assert rows["gradients sent per rank and step"] == ["8.000 MB", "1.000 MB", "-87.50%"]
    assert rows["optimizer steps"] == ["3", "3", ""]


LEFT = {
    "bytes_raw_per_step": 250_000,
    "bytes_weights_per_step": 0,
    "bytes_pipeline_per_step": 2_000_000,
    "bytes_tied_per_step": 0,
    "bytes_tensor_per_step": 500_000,
}


def test_traffic_is_stacked_by_kind(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "int4", 2.0, 1_000_000, **LEFT)
    dense = finished_run(tmp_path / "dense", 2.0, 8_000_000, **LEFT | {"bytes_raw_per_step": 8_000_000})
    assert {kind.title: sizes for kind, sizes in traffic(load_runs(run, dense))} == {
        "gradients, compressed": [0.0, 0.75],
        "gradients, uncompressed": [8.0, 0.25],
        "activations between stages": [2.0, 2.0],
        "tensor parallelism": [0.5, 0.5],
    }
    page, picture = write_report(run, dense, tmp_path)
    assert "Sent by one rank in a step" in page.read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_kinds_without_traffic_have_no_row(tmp_path: Path) -> None:
    rows = {row[0]: row[1] for row in table_rows(load_runs(finished_run(tmp_path / "a", 2.0, 1_000_000, **LEFT), None))}
    assert rows["sent: activations between stages"] == "2.000 MB"
    assert rows["sent: gradients, uncompressed"] == "0.250 MB"
    assert not any("weights" in title for title in rows)


def test_older_runs_have_no_stack(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert traffic(load_runs(*runs)) == []
    page, _ = write_report(*runs, tmp_path)
    assert "Sent by one rank in a step" not in page.read_text(encoding="utf-8")


def test_a_summary_has_the_kinds_that_every_line_has(tmp_path: Path) -> None:
    file = tmp_path / "compression.jsonl"
    lines = [
        {"bytes_sent": sent, "bytes_uncompressed": 80, "bytes_tied": 3 * sent, "bytes_tensor": tensor}
        for sent, tensor in ((10, 5), (30, None))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compression_figures(file) == {
        "bytes_sent_per_step": 20,
        "bytes_uncompressed_per_step": 80,
        "bytes_tied_per_step": 60,
        "compression_ratio": 4.0,
    }


def test_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no summary.json" in capsys.readouterr().err


def test_the_command_prints_the_table(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs[0]), "--baseline", str(runs[1])]) == 0
    shown = capsys.readouterr().out
    assert "held-out loss" in shown
    assert str(runs[0] / "report.html") in shown


def test_without_the_plotting_packages(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(DataError, match="pip install"):
        write_report(*runs, tmp_path)


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert _distinct_names(Path("/runs/none/seed0"), Path("/runs/int4/seed0")) == ("none/seed0", "int4/seed0")
    assert _distinct_names(Path("/runs/dense"), Path("/runs/int4")) == ("dense", "int4")
