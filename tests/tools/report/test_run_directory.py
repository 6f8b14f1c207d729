"""Reading of run directories: several runs in one, resumed runs, and repeated steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.monitor import Journal
from deepspeed_compress.tools.doctor.case import read_run
from deepspeed_compress.tools.report import load_runs
from deepspeed_compress.tools.report.runs import event_rows
from deepspeed_compress.tools.run_directory import read_directory, read_statistics
from tests.support.runs import trainer_run, write_lines
from tests.support.synthetic_runs import HEALTHY


class Process:
    """Process of the run `run` that was started at second `started`, and writes into `directory`."""

    def __init__(self, directory: Path, run: str, started: int, since: int = 0) -> None:
        self.journal = Journal(str(directory), run, since)
        object.__setattr__(self.journal.part, "started", f"2026-01-01T00:00:{started:02d}")

    def measure(self, *steps: int, **more: Any) -> None:
        for step in steps:
            self.journal.add("compression.jsonl", {"step": step, **HEALTHY, **more})

    def add_event(self, step: int, kind: str, **more: Any) -> None:
        file = "island_0001/events.jsonl" if more.get("island") else "events.jsonl"
        self.journal.add(file, {"step": step, "kind": kind, "reason": "", **more})


def steps(directory: Path) -> list[int]:
    """Return the measured steps, which report and doctor read alike."""
    [run] = load_runs(directory, None)
    found = [line["step"] for line in read_run(directory).steps]
    assert found == list(run.column("bytes_sent")) == [line["step"] for line in read_statistics(directory)]
    return found


def kinds(directory: Path) -> list[str]:
    [run] = load_runs(directory, None)
    events = read_run(directory).events
    assert events is not None
    assert [event["kind"] for event in events] == [event["kind"] for event in run.events]
    return [event["kind"] for event in events]


def test_a_shorter_second_run_hides_the_first(tmp_path: Path) -> None:
    first, second = Process(tmp_path, "a", 0), Process(tmp_path, "b", 10)
    first.measure(*range(1, 101), bytes_sent=1)
    first.add_event(30, "anomaly")
    # The second run is measured less often, so its steps alone do not replace all steps of the first.
    second.measure(10, 20, bytes_sent=2)
    second.add_event(15, "schedule")
    assert steps(tmp_path) == [10, 20]
    assert kinds(tmp_path) == ["schedule"]


def test_a_resumed_run_has_no_repeated_steps(tmp_path: Path) -> None:
    killed, resumed = Process(tmp_path, "a", 0), Process(tmp_path, "a", 10, since=20)
    killed.measure(*range(1, 31))
    killed.add_event(10, "full_sync")
    killed.add_event(25, "anomaly")
    resumed.measure(30, 40)
    assert steps(tmp_path) == [*range(1, 21), 30, 40]
    assert kinds(tmp_path) == ["full_sync"]


def test_a_resumed_run_has_no_repeated_events_of_islands(tmp_path: Path) -> None:
    """The report shows the events of all islands, and the doctor only those of the first."""
    killed, resumed = Process(tmp_path, "a", 0), Process(tmp_path, "a", 10, since=20)
    killed.measure(*range(1, 31))
    killed.add_event(15, "return", island=0)
    for step in (12, 25):
        killed.add_event(step, "anomaly", island=1)
    resumed.measure(30)
    [run] = load_runs(tmp_path, None)
    assert [row[:2] for row in event_rows(run)] == [["12", "island 1: anomaly"], ["15", "island 0: return"]]
    assert [event["step"] for event in read_run(tmp_path).events or ()] == [15]


def test_of_two_processes_from_one_checkpoint_the_last_counts(tmp_path: Path) -> None:
    for started, since, last in ((0, 0, 30), (10, 20, 26), (20, 20, 24)):
        process = Process(tmp_path, "a", started, since)
        process.measure(*range(since + 1, last + 1), bytes_sent=started)
        process.add_event(last, f"event of {started}")
    assert steps(tmp_path) == list(range(1, 25))
    assert kinds(tmp_path) == ["event of 20"]


def test_a_rollback_in_one_process_keeps_its_event(tmp_path: Path) -> None:
    process = Process(tmp_path, "a", 0)
    process.measure(*range(1, 31))
    process.add_event(30, "checkpoint_rollback")
    process.journal.continue_from(20)
    process.measure(21, 22)
    assert steps(tmp_path) == list(range(1, 23))
    assert kinds(tmp_path) == ["checkpoint_rollback"]


def test_the_summary_names_the_run(tmp_path: Path) -> None:
    statistics, output = tmp_path / "statistics", tmp_path / "output"
    output.mkdir()
    Process(statistics, "a", 0).measure(1, 2, 3)
    Process(statistics, "b", 10).measure(1)
    (output / "summary.json").write_text(json.dumps({"monitor_path": str(statistics), "run": "a"}))
    assert [line["step"] for line in read_run(output).steps] == [1, 2, 3]
    assert list(load_runs(output, None)[0].column("bytes_sent")) == [1, 2, 3]


def test_the_checkpoint_that_was_written_last_belongs_to_the_run(tmp_path: Path) -> None:
    """An older, longer run may have left others."""
    for last in (15, 5, 10):
        trainer_run(tmp_path, f"checkpoint-{last}", last)
    trainer = read_directory(tmp_path).trainer
    assert trainer is not None
    assert trainer["global_step"] == 10
    assert load_runs(tmp_path, None)[0].status == "still running: step 10 of 20"


@pytest.mark.parametrize("reader", [read_run, lambda directory: load_runs(directory, None)])
def test_lines_of_older_versions_are_read_by_their_order(reader: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "compression.jsonl", [{"step": step, **HEALTHY} for step in (1, 2, 3, 2)])
    assert steps(tmp_path) == [1, 2]


def test_a_resumed_process_without_measurements_keeps_earlier_steps(tmp_path: Path) -> None:
    Process(tmp_path, "a", 0).measure(*range(1, 31))
    Process(tmp_path, "a", 10, since=20).add_event(22, "anomaly")
    assert steps(tmp_path) == list(range(1, 21))
    assert kinds(tmp_path) == ["anomaly"]


def test_a_run_interrupted_by_another_is_read_whole(tmp_path: Path) -> None:
    Process(tmp_path, "a", 0).measure(*range(1, 11))
    Process(tmp_path, "b", 10).measure(*range(1, 16))
    Process(tmp_path, "a", 20, since=10).measure(11, 12)
    assert steps(tmp_path) == list(range(1, 13))
