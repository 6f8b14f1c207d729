import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config.numbers import short
from deepspeed_compress.tools.report import load_runs
from deepspeed_compress.tools.report.figures import table_rows, tiles
from deepspeed_compress.tools.report.page import page, step_scale, value_scale
from deepspeed_compress.tools.report.panels import POINTS, bars, charts, missing
from deepspeed_compress.tools.report.runs import (
    SHOWN,
    Run,
    event_rows,
    markers,
    setting_colours,
    settings_timelines,
    steps_by_setting,
)
from deepspeed_compress.training.output import compression_figures
from tests.support.runs import KINDS, REASON, SETTING, long_run, small_run, trainer_run, write_lines


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return small_run(tmp_path / "int4", 2.02, 1_000_000), small_run(tmp_path / "dense", 2.0, 8_000_000)


def alone(directory: Path) -> Run:
    [run] = load_runs(directory, None)
    return run


def figures(*runs: Run) -> dict[str, list[str]]:
    return {title: cells for title, *cells in table_rows([*runs])}


def titles(*runs: Run) -> list[str]:
    return [chart.title for chart in charts([*runs])]


def test_the_command_writes_a_page_and_prints_the_table(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs[0]), "--baseline", str(runs[1]), "--output", f"{tmp_path}/report"]) == 0
    shown = capsys.readouterr().out
    assert "held-out loss" in shown
    assert shown.splitlines()[-1] == f"{tmp_path}/report/report.html"
    text = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert "int4 against dense" in text
    assert "+1.00%" in text
    assert "&lt;ds&gt;.json" in text


def test_the_page_needs_no_other_files(runs: tuple[Path, Path]) -> None:
    text = page(load_runs(*runs))
    assert not re.findall(r"https?:|src=|<link|url\(|@import", text)
    assert len(text) < 100_000


def test_the_page_shows_no_secrets(tmp_path: Path) -> None:
    """A program may have written its configuration, with secrets, into the directory of the run."""
    run = small_run(tmp_path / "run", 2.0, None)
    (run / "ds_config.json").write_text(json.dumps({"comet": {"api_key": "abcdef"}}))
    text = page([alone(run)])
    assert "api_key" in text
    assert "abcdef" not in text


def test_the_ratio_of_all_traffic_precedes_that_of_gradients(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    lines = [
        {
            "step": 1,
            "bytes_sent": 10,
            "bytes_uncompressed": 100,
            "bytes_weights": 20,
            "total_ratio": 4.0,
            "ratio": 10.0,
        },
        {"step": 2, "bytes_sent": 90, "bytes_uncompressed": 90, "bytes_weights": 30, "total_ratio": 1.0, "ratio": 1.0},
    ]
    write_lines(run / "compression.jsonl", lines)
    shown = [(title, value) for title, value, _ in tiles([alone(run)]) if "ratio" in title]
    assert shown == [("compression ratio of all traffic", "1.60"), ("compression ratio of gradients", "1.90")]


def test_changes_are_shown_only_for_comparable_figures(runs: tuple[Path, Path]) -> None:
    rows = figures(*load_runs(*runs))
    assert rows["held-out loss"] == ["2.0000", "2.0200", "+1.00%"]
    assert rows["gradients sent per rank and step"] == ["8.000 MB", "1.000 MB", "-87.50%"]
    assert rows["compression ratio of gradients"] == ["1.00", "8.00", ""]
    assert rows["optimizer steps"] == ["3", "3", ""]
    assert rows["parameters"] == ["1,234", "1,234", ""]


def run_of(directory: Path, steps: int, evaluated: tuple[int, ...] = ()) -> Path:
    """Write a run whose losses fall by 0.1 in each step."""
    lines = [{"step": step, "train_loss": 9 - step / 10} for step in range(1, steps + 1)]
    lines += [{"step": step, "eval_loss": 9 - step / 10} for step in evaluated]
    write_lines(directory / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
    return directory


def test_losses_are_compared_at_equal_steps(tmp_path: Path) -> None:
    """The same training, for 30 and 40 steps, has no change. Alone, a run shows its last steps."""
    shorter, longer = run_of(tmp_path / "a", 30, (20, 30)), run_of(tmp_path / "b", 40, (20, 40))
    for pair in ((shorter, longer), (longer, shorter)):
        rows = figures(*load_runs(*pair))
        assert rows["training loss, last tenth, up to step 30"] == ["6.1000", "6.1000", "+0.00%"]
        assert rows["held-out loss, up to step 20"] == ["7.0000", "7.0000", "+0.00%"]
        assert tiles(load_runs(*pair))[0][0] == "held-out loss, up to step 20"
    assert figures(alone(longer))["training loss, last tenth"] == ["5.1500"]
    assert figures(alone(longer))["held-out loss"] == ["5.0000"]
    rows = figures(*load_runs(run_of(tmp_path / "c", 30, (30,)), run_of(tmp_path / "d", 40, (40,))))
    assert rows["held-out loss"] == ["5.0000", "6.0000", ""]


def test_figures_of_whole_runs_have_no_change_if_these_have_different_lengths(tmp_path: Path) -> None:
    def finished(name: str, steps: int) -> Path:
        log = [{"step": step, "loss": 1.0} for step in (10, steps)]
        log.append({"step": steps, "train_runtime": 6.0 * steps, "train_loss": 100.0 / steps})
        write_lines(tmp_path / name / "trainer_state.json", [{"global_step": steps, "log_history": log}])
        return tmp_path / name

    time, mean = "training time, including evaluation and saving", "training loss, mean of the whole run"
    rows = figures(*load_runs(finished("a", 20), finished("b", 40)))
    assert (rows[time], rows[mean]) == (["240.0 s", "120.0 s", ""], ["2.5000", "5.0000", ""])
    rows = figures(*load_runs(finished("a", 20), finished("c", 20)))
    assert rows[time][-1] == rows[mean][-1] == "+0.00%"


OTHER_BYTES = {
    "bytes_raw": 250_000,
    "bytes_weights": 0,
    "bytes_pipeline": 2_000_000,
    "bytes_tied": 0,
    "bytes_tensor": 500_000,
    "bytes_experts": 250_000,
}


def test_traffic_is_stacked_by_kind(tmp_path: Path) -> None:
    run = small_run(tmp_path / "int4", 2.0, 1_000_000, **OTHER_BYTES)
    dense = small_run(tmp_path / "dense", 2.0, 8_000_000, **OTHER_BYTES | {"bytes_raw": 8_000_000})
    [traffic] = bars(load_runs(run, dense))
    assert traffic.runs == ("dense", "int4")
    assert {title: sizes for title, _, sizes in traffic.parts} == {
        "gradients, compressed": (0.0, 0.75),
        "gradients, uncompressed": (8.0, 0.25),
        "activations between stages": (2.0, 2.0),
        "tensor parallelism": (0.5, 0.5),
        "tokens between experts": (0.25, 0.25),
    }


def test_missing_charts_are_listed_with_their_sources(runs: tuple[Path, Path]) -> None:
    [run] = found = load_runs(runs[0], None)
    assert titles(run) == [
        "Loss: held-out, and training (faint)",
        "Step time, ms",
        "Gradients sent per rank and step, MB",
        "Compression ratio of gradients",
    ]
    listed = missing(found)
    assert listed["Norm of the residuals"] == "compression.jsonl, written to monitor.path"
    assert listed.keys() >= {"Peak memory of a rank, GiB", "Sent by one rank in a step, MB", "Settings in force"}
    assert not listed.keys() & set(titles(run))
    assert "Peak memory of a rank, GiB (needs compression.jsonl of this version)" in page(found)


def test_the_traffic_of_deepspeed_alone_is_drawn_once(runs: tuple[Path, Path]) -> None:
    chart = next(chart for chart in charts(load_runs(*runs)) if chart.title.startswith("Gradients sent"))
    assert [(line.name, line.dashed) for line in chart.lines] == [
        ("dense", False),
        ("DeepSpeed alone", True),
        ("int4", False),
    ]


def test_an_unfinished_run_is_still_running(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, 1_000_000)
    assert alone(run).status == "finished, 3 steps"
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "train_l')
    assert alone(run).status == "still running: 3 steps so far"
    assert "run: still running: 3 steps so far" in page([alone(run)])


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert f"{tmp_path}: holds no run" in shown
    assert "give the output directory" in shown
    assert not (tmp_path / "report.html").exists()


def test_a_finished_trainer_run_is_shown(tmp_path: Path) -> None:
    run = alone(trainer_run(tmp_path / "run"))
    assert run.status == "finished, 20 steps"
    assert titles(run) == [
        "Loss: held-out, and training (faint)",
        "Gradients sent per rank and step, MB",
        "Compression ratio of gradients",
        "Norm of the gradient",
    ]
    rows = figures(run)
    assert rows["held-out loss"] == ["6.5000"]
    assert rows["training loss, last tenth"] == ["7.0000"]
    assert rows["compression ratio of gradients"] == ["15.50"]


def test_logs_are_preferred_for_the_loss_and_statistics_for_the_gradient_norm(tmp_path: Path) -> None:
    """The statistics have the loss of single steps, and the gradient norm of every step."""
    run, lines = tmp_path / "run", [{"step": step, "loss": 5.0, "grad_norm": 2.0} for step in (1, 2)]
    write_lines(run / "compression.jsonl", lines)
    assert alone(run).column("train_loss") == {1: 5.0, 2: 5.0}
    trainer_run(run)
    assert set(alone(run).column("train_loss")) == {5, 10, 15, 20}
    assert set(alone(run).column("grad_norm")) == {1, 2}


@pytest.mark.parametrize("named_in", ["summary.json", "ds_config.json"])
def test_statistics_in_another_directory_are_found(named_in: str, tmp_path: Path) -> None:
    run, elsewhere = small_run(tmp_path / "run", 2.0, 1_000_000), tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(run / "compression.jsonl", elsewhere)
    write_lines(elsewhere / "events.jsonl", [{"step": 1, "kind": "full_sync"}])
    ds_config = {"deepspeed_compress": {"monitor": {"path": str(elsewhere)}}}
    value = ds_config if named_in == "ds_config.json" else {"monitor_path": str(elsewhere)}
    (run / named_in).write_text(json.dumps(value))
    assert set(alone(run).column("bytes_sent")) == {1, 2, 3}
    assert len(alone(run).events) == 1


def test_long_lines_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    lines = [{"step": step, "train_loss": 90.0 if step == 7777 else 2.0 - step / 1e5} for step in range(1, 20_001)]
    write_lines(run / "metrics.jsonl", lines)
    [line] = charts([alone(run)])[0].lines
    assert POINTS / 2 < len(line.steps) <= POINTS
    assert dict(zip(line.steps, line.values, strict=True))[7777] == 90.0
    assert list(line.steps) == sorted(set(line.steps))


def test_an_exploding_norm_has_a_logarithmic_axis(tmp_path: Path) -> None:
    found = {chart.title: chart for chart in charts([alone(long_run(tmp_path / "run", compressed=True))])}
    assert {title for title, chart in found.items() if chart.decades} == {"Norm of the gradient"}
    scale = value_scale(found["Norm of the gradient"])
    assert (scale.low, scale.high) == (1.0, 1e7)
    assert scale.share(10.0) == pytest.approx(1 / 7)


def test_events_are_marked_and_listed(tmp_path: Path) -> None:
    run = alone(long_run(tmp_path / "run", compressed=True))
    assert [mark.step for mark in markers(run)] == [55 * index for index in range(1, 8)]
    assert event_rows(run)[2] == ["165", "anomaly", REASON, f"none \N{RIGHTWARDS ARROW} {SETTING}"]
    assert charts([run])[0].markers == markers(run)
    text = page([run])
    assert text.count('class="mark"') == len(KINDS)
    assert "<td>checkpoint rollback</td>" in text


def settings_run(directory: Path, settings: str) -> Run:
    """Write a run with one measured step per letter of `settings`."""
    run = small_run(directory, 2.0, None)
    names: dict[str, Any] = {"n": "none", "a": "blockwise bits=4", "b": "sign"}
    write_lines(run / "compression.jsonl", [{"step": 2 * i, "settings": names[x]} for i, x in enumerate(settings, 1)])
    return alone(run)


def test_settings_are_shown_as_intervals_of_steps(tmp_path: Path) -> None:
    run = settings_run(tmp_path / "run", "nnaabaa")
    [timeline] = settings_timelines([run]).values()
    assert [(interval.setting, interval.first, interval.last) for interval in timeline] == [
        ("none", 2, 4),
        ("blockwise bits=4", 6, 8),
        ("sign", 10, 10),
        ("blockwise bits=4", 12, 14),
    ]
    assert steps_by_setting(timeline)["blockwise bits=4"] == "steps 6 to 8, 12 to 14"
    assert steps_by_setting(timeline)["sign"] == "steps 10"
    assert "blockwise bits=4: steps 6 to 8, 12 to 14" in page([run])


def test_losses_without_common_steps_have_no_change(tmp_path: Path) -> None:
    rows = figures(*load_runs(run_of(tmp_path / "a", 30, (30,)), run_of(tmp_path / "b", 40, (40,))))
    assert rows["held-out loss"] == ["5.0000", "6.0000", ""]


def test_tiles_show_the_run_before_the_baseline(runs: tuple[Path, Path]) -> None:
    assert tiles(load_runs(*runs))[0] == ("held-out loss", "2.0200", "2.0000 dense (+1.00%)")
    assert tiles(load_runs(runs[0], None))[0] == ("held-out loss", "2.0200", "")
    assert figures(alone(runs[0]))["held-out loss"] == ["2.0200"]


def test_kinds_without_traffic_have_no_row(tmp_path: Path) -> None:
    rows = figures(alone(small_run(tmp_path / "a", 2.0, 1_000_000, **OTHER_BYTES)))
    assert rows["sent: activations between stages"] == ["2.000 MB"]
    assert rows["sent: gradients, uncompressed"] == ["0.250 MB"]
    assert not any("weights" in title for title in rows)
    rows = figures(alone(small_run(tmp_path / "b", 2.0, 1_000_000, **OTHER_BYTES | {"bytes_tensor": None})))
    assert "sent: tensor parallelism" not in rows


def test_the_time_of_a_step_is_split(tmp_path: Path) -> None:
    time, traffic = bars([alone(long_run(tmp_path / "run", compressed=True))])
    assert [(title, values) for title, _, values in time.parts] == [
        ("all else, with DeepSpeed's own messages", (pytest.approx(230 - 36),)),
        ("compress", (9.0,)),
        ("wait for communication", (22.0,)),
        ("decompress", (5.0,)),
    ]
    assert "weights" in [title for title, _, _ in traffic.parts]


def test_summary_figures_need_kinds_in_every_line() -> None:
    pairs = ((10, 5), (30, None))
    lines = [{"bytes_sent": a, "bytes_uncompressed": 80, "bytes_tied": 3 * a, "bytes_tensor": b} for a, b in pairs]
    assert compression_figures(lines) == {
        "bytes_sent_per_step": 20,
        "bytes_uncompressed_per_step": 80,
        "bytes_tied_per_step": 60,
    }


def test_a_complete_run_has_all_charts(tmp_path: Path) -> None:
    run = alone(long_run(tmp_path / "run", compressed=True))
    assert missing([run]) == {}
    assert len(titles(run)) == 9
    assert "Left out" not in page([run])


def test_without_held_out_loss_the_training_loss_is_not_faint(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    write_lines(run / "metrics.jsonl", [{"step": 1, "train_loss": 3.0}])
    [loss] = charts([alone(run)])
    assert [line.faint for line in loss.lines] == [False]


def test_a_report_needs_only_statistics(tmp_path: Path) -> None:
    """The directory is the monitor.path of a program that writes no other known files."""
    run = small_run(tmp_path / "run", 2.0, 1_000_000)
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    assert alone(run).status.startswith("3 steps so far (")
    assert titles(alone(run)) == ["Gradients sent per rank and step, MB", "Compression ratio of gradients"]


def test_statistics_are_preferred_to_means_of_trainer(tmp_path: Path) -> None:
    run = small_run(trainer_run(tmp_path / "run"), 2.0, 1_000_000)
    assert set(alone(run).column("bytes_sent")) == {1, 2, 3}
    assert set(alone(run).column("grad_norm")) == {5, 10, 15, 20}


def test_lines_lie_within_their_axes(tmp_path: Path) -> None:
    for chart in charts([alone(long_run(tmp_path / "run", compressed=True))]):
        up, across = value_scale(chart), step_scale(chart)
        for line in chart.lines:
            assert all(0 <= up.share(value) <= 1 for value in line.values), chart.title
            assert all(0 <= across.share(step) <= 1 for step in line.steps), chart.title
        assert len(up.ticks) >= 2, chart.title
        assert len(across.ticks) >= 2


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_a_flat_line_has_space_above_and_below(value: float, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    write_lines(run / "metrics.jsonl", [{"step": 7, "train_loss": value}])
    [chart] = charts([alone(run)])
    assert 0 < value_scale(chart).share(value) < 1
    assert step_scale(chart).share(7) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (1234.56, "1235"), (20_000.0, "20k"), (3.1e6, "3.1M"), (2e9, "2G"), (-20_000.0, "-20k"), (0.0, "0")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_an_event_of_a_later_version_is_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    write_lines(run / "events.jsonl", [{"step": 2, "kind": "a_new_<kind>", "dry_run": True, "after": "none"}])
    assert event_rows(alone(run)) == [["2", "a new <kind> (dry run)", "", "none"]]
    assert "a new &lt;kind&gt;" in page([alone(run)])


def test_only_the_last_of_many_events_are_listed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 2.0, None)
    write_lines(run / "events.jsonl", [{"step": step, "kind": "full_sync"} for step in range(1, SHOWN + 11)])
    assert [row[0] for row in event_rows(alone(run))][:: SHOWN - 1] == ["11", f"{SHOWN + 10}"]
    assert f"The last {SHOWN} of {SHOWN + 10} events." in page([alone(run)])


def test_a_setting_has_the_same_color_in_both_runs(tmp_path: Path) -> None:
    shown = settings_timelines([settings_run(tmp_path / "baseline", "nb"), settings_run(tmp_path / "run", "ab")])
    assert setting_colours(shown) == {"none": "baseline", "blockwise bits=4": "run", "sign": "purple"}
    [timeline] = settings_timelines([settings_run(tmp_path / "often", "na" * 10)]).values()
    assert steps_by_setting(timeline)["none"] == "steps 2, 6, 10, 14, 18, 22, and 4 more times"
