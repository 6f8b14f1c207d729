"""Reports of runs with islands, of runs that publish weights for rollout workers, and of plain Trainer runs."""

import json
from pathlib import Path
from typing import Any

from deepspeed_compress.monitor import Journal
from deepspeed_compress.tools.report import load_runs, page
from deepspeed_compress.tools.report.figures import table_rows, tiles
from deepspeed_compress.tools.report.panels import charts, missing
from deepspeed_compress.tools.report.runs import settings_timelines
from tests.support.runs import trainer_run, write_lines

EXCHANGED = 4_000_000


def islands_run(directory: Path, elastic: bool = False) -> Path:
    """Write 41 steps of a rank that is its own island and exchanges after every 10 steps."""
    lines = [measured(step, exchanged=step % 10 == 1 and step > 1) for step in range(1, 42)]
    write_lines(directory / "compression.jsonl", lines)
    events = [
        {"step": step, "kind": kind, "reason": "", "evidence": {"round": step / 10, "seconds": 0.5}}
        for step, kind in ((10, "islands_exchange"), (20, "islands_void"))
    ]
    write_lines(directory / "events.jsonl", events if elastic else [])
    return directory


def measured(step: int, exchanged: bool) -> dict[str, Any]:
    sizes = {"bytes_sent": 0, "bytes_raw": 0, "bytes_uncompressed": 0, "bytes_islands": EXCHANGED if exchanged else 0}
    times = {"compress_ms": 0.0, "communicate_ms": 0.0, "decompress_ms": 0.0, "step_ms": 350.0 if exchanged else 250.0}
    return {"step": step, "method": "blockwise", "settings": "blockwise bits=4", **sizes, **times}


def figures(directory: Path) -> dict[str, str]:
    return {title: cells[0] for title, *cells in table_rows(load_runs(directory, None))}


def test_exchanges_are_shown_and_gradient_traffic_is_not(tmp_path: Path) -> None:
    found = figures(islands_run(tmp_path))
    assert found["exchanges between islands"] == "4"
    assert found["sent per rank and exchange"] == "4.000 MB"
    assert found["extra time of a step with an exchange"] == "100.0 ms"
    assert "gradients sent per rank and step" not in found
    runs = load_runs(tmp_path, None)
    assert not settings_timelines(runs)
    titles = [chart.title for chart in charts(runs)]
    assert "Sent to other islands per rank and step, MB" in titles
    assert "Gradients sent per rank and step, MB" not in titles
    assert "exchanges between islands" in [title for title, _, _ in tiles(runs)]
    assert "Gradients sent" not in page(runs)


def test_elastic_islands_show_all_exchanges_and_what_failed(tmp_path: Path) -> None:
    """Islands write an event for the first exchange and for those that fail, but none for the others."""
    found = figures(islands_run(tmp_path, elastic=True))
    assert found["exchanges between islands"] == "4"
    assert found["exchanges discarded"] == "1"
    assert found["time lost in exchanges that failed"] == "0.5 s"


def test_a_plain_trainer_run_is_a_baseline(tmp_path: Path) -> None:
    """The plain run has only figures of the whole run, without a log and statistics."""
    plain = tmp_path / "plain"
    plain.mkdir()
    state = {"global_step": 20, "max_steps": 20, "log_history": []}
    (plain / "trainer_state.json").write_text(json.dumps(state))
    (plain / "all_results.json").write_text(json.dumps({"train_loss": 7.5, "train_runtime": 12.0, "epoch": 1.0}))
    ours = trainer_run(tmp_path / "ours")
    rows = {title: cells for title, *cells in table_rows(load_runs(ours, plain))}
    assert rows["training loss, mean of the whole run"][:2] == ["7.5000", "7.7000"]
    assert rows["training time, including evaluation and saving"] == ["12.0 s", "6.0 s", "-50.00%"]


STEP = {"method": "none", "settings": "none", "step_ms": 250.0}


def publishing_run(directory: Path) -> Path:
    """Write 20 steps, each with a version, of which the first one and the eleventh have full copies."""
    write_lines(directory / "compression.jsonl", [{"step": step, **STEP} for step in range(1, 21)])
    versions = [
        {
            "step": step,
            "rollout_version": step + 1,
            "rollout_bytes": 300_000,
            "rollout_full_bytes": 0 if step % 10 else 15_000_000,
            "rollout_changed": 0.025,
            "rollout_encode_ms": 40.0,
            "rollout_write_ms": 10.0,
            "rollout_publish_ms": 60.0,
            "rollout_age_ms": 310.0 if step else None,
            "rollout_lag": 1.0 if step else None,
        }
        for step in range(21)
    ]
    write_lines(directory / "rollout.jsonl", versions)
    return directory


def test_versions_are_shown(tmp_path: Path) -> None:
    found, runs = figures(publishing_run(tmp_path)), load_runs(tmp_path, None)
    assert found["versions for rollout workers"] == "21"
    assert found["bytes of a version"] == "0.300 MB"
    assert found["bytes of a full copy"] == "15.000 MB"
    assert found["values that change in a version"] == "2.50%"
    assert found["time to encode a version"] == "40.0 ms"
    assert found["time to write a version"] == "10.0 ms"
    assert found["largest age of weights of rollout workers, mean"] == "310.0 ms"
    assert found["versions by which rollouts are behind"] == "1.00"
    titles = [chart.title for chart in charts(runs)]
    assert "Changes for rollout workers per version, MB" in titles
    assert "Age of the weights of rollout workers, s" in titles


def test_other_runs_mention_neither_islands_nor_rollouts(tmp_path: Path) -> None:
    found, runs = figures(trainer_run(tmp_path)), load_runs(tmp_path, None)
    assert not [title for title in found if "exchange" in title or "rollout" in title]
    assert not [one for one in missing(runs) if "islands" in one or "rollout" in one]
    assert "rollout" not in page(runs)


def test_versions_are_shown_before_the_first_step_is_measured(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "a")
    journal.add("rollout.jsonl", {"step": 0, "rollout_version": 1, "rollout_bytes": 300_000})
    assert figures(tmp_path)["bytes of a version"] == "0.300 MB"
