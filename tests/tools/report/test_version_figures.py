"""Reports of runs that publish weights for rollout workers."""

from pathlib import Path

from deepspeed_compress.monitor import Journal
from deepspeed_compress.tools.report import load_runs, page
from deepspeed_compress.tools.report.figures import table_rows
from deepspeed_compress.tools.report.panels import charts, missing
from tests.support.runs import write_lines

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
    runs = load_runs(publishing_run(tmp_path), None)
    found = {title: cells[0] for title, *cells in table_rows(runs)}
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


def test_versions_are_shown_before_the_first_step_is_measured(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "a")
    journal.add("rollout.jsonl", {"step": 0, "rollout_version": 1, "rollout_bytes": 300_000})
    found = {title: cells[0] for title, *cells in table_rows(load_runs(tmp_path, None))}
    assert found["bytes of a version"] == "0.300 MB"


def test_other_runs_do_not_mention_rollouts(tmp_path: Path) -> None:
    write_lines(tmp_path / "compression.jsonl", [{"step": step, **STEP} for step in range(1, 21)])
    runs = load_runs(tmp_path, None)
    assert not [title for title, *_ in table_rows(runs) if "rollout" in title]
    assert not [one for one in missing(runs) if "rollout" in one]
    assert "rollout" not in page(runs)
