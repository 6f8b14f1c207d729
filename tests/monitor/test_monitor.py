import errno
import fcntl
import json
import math
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import (
    KINDS,
    SAVED,
    Event,
    EventLog,
    Journal,
    Meter,
    StatisticsWriter,
    StepStatistics,
)
from deepspeed_compress.monitor.meter import PHASES

CPU = torch.device("cpu")
STATISTICS = StepStatistics(
    step=3,
    samples=96,
    method="blockwise",
    rank=2,
    bytes_sent=1000,
    bytes_raw=300,
    bytes_uncompressed=4000,
    bytes_weights=2000,
    bytes_weights_saved=6000,
    bytes_pipeline=700,
    bytes_tied=50,
    bytes_tensor=None,
    total_ratio=3.4,
    ratio=4.0,
    compress_ms=1.5,
    communicate_ms=20.0,
    decompress_ms=0.5,
    residual_norm=0.25,
    cosine=None,
    settings="blockwise bits=4",
    step_ms=300.0,
    busy_ms=280.0,
    busy_ms_median=281.0,
    busy_ms_max=290.0,
    slowest_rank=3,
    memory_bytes=10**9,
    grad_norm=1.5,
    loss=5.25,
)
LINE = dict(vars(STATISTICS))
"""Fields of a line of compression.jsonl."""
PAGE = Path(__file__).parents[2] / "docs/monitoring.md"


class Sink:
    """A recorder of events in place of DeepSpeed's monitor."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.events += event_list


def lines(directory: Path) -> list[str]:
    return (directory / "compression.jsonl").read_text(encoding="utf-8").splitlines()


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the lines without their `run`."""
    found = [json.loads(line, parse_constant=refuse) for line in lines(directory)]
    assert all(line.pop("run")["id"] == "run" for line in found)
    return found


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_line_has_exactly_the_documented_fields(tmp_path: Path) -> None:
    StatisticsWriter(Journal(str(tmp_path), "run"), None).write(STATISTICS)
    assert read(tmp_path) == [LINE]
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in LINE if f"`{name}`" not in page] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_become_null(tmp_path: Path, value: float) -> None:
    sink = Sink()
    StatisticsWriter(Journal(str(tmp_path), "run"), sink).write(replace(STATISTICS, residual_norm=value, cosine=value))
    [line] = read(tmp_path)
    assert line == {**LINE, "residual_norm": None, "cosine": None}
    assert all(math.isfinite(number) for _, number, _ in sink.events)


def test_every_number_is_an_event_at_the_samples_seen() -> None:
    sink = Sink()
    StatisticsWriter(Journal(None), sink).write(STATISTICS)
    labels = ("step", "samples", "method", "rank", "settings", "slowest_rank")
    unknown = ("bytes_tensor", "cosine", "islands_cosine")
    names = {name: value for name, value in LINE.items() if name not in labels + unknown} | {"time_ms": 22.0}
    assert sink.events == [(f"Train/Samples/compression_{name}", value, 96) for name, value in names.items()]


def test_times_of_a_phase_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.25, 1.0, 1.5, 2.0, 2.125])
    monkeypatch.setattr("deepspeed_compress.monitor.meter.time.perf_counter", lambda: next(ticks))
    meter = Meter()
    for name in ("compress", "communicate", "compress"):
        with meter.phase(name, CPU):
            pass
    assert meter.milliseconds() == {"compress": 375.0, "communicate": 500.0, "decompress": 0.0}


def test_a_meter_has_all_byte_counters_of_a_line() -> None:
    sizes = Meter(bytes_sent=1, bytes_tensor=2).sizes()
    assert sizes == {name: {"bytes_sent": 1, "bytes_tensor": 2}.get(name, 0) for name in LINE if "bytes_" in name}
    assert set(KINDS) == sizes.keys() - {"bytes_raw", "bytes_uncompressed", "bytes_exact", *SAVED}


def test_a_step_begins_with_an_empty_meter() -> None:
    meter = Meter(bytes_sent=1, bytes_uncompressed=2, bytes_weights=3, bytes_tied=4, cosine=0.5)
    with meter.phase("compress", CPU):
        pass
    meter.reset(timed=False)
    assert meter == Meter(timed=False)
    assert (meter.bytes_sent, meter.bytes_tied, meter.cosine) == (0, 0, None)
    assert set(meter.milliseconds().values()) == {0.0}


def test_phases_appear_in_the_profiler() -> None:
    with torch.profiler.profile() as trace:
        for name in PHASES:
            with Meter().phase(name, torch.device("cpu")):
                torch.zeros(1)
    found = {event.key for event in trace.key_averages()}
    assert {f"deepspeed_compress.{name}" for name in PHASES} <= found


EVENT = Event(7, "anomaly", "why", {"norm": math.inf}, "sign", "none")


def run_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines(directory)[-1])["run"]
    return found


def test_a_line_names_its_run_and_process(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "a", 4)
    StatisticsWriter(journal, None).write(STATISTICS)
    assert (run_of(tmp_path)["id"], run_of(tmp_path)["since"]) == ("a", 4)
    journal.continue_from(9)
    journal.adopt("b")
    StatisticsWriter(journal, None).write(STATISTICS)
    assert (run_of(tmp_path)["id"], run_of(tmp_path)["since"]) == ("b", 9)
    assert len({json.loads(line)["run"]["started"] for line in lines(tmp_path)}) == 1


def test_a_resumed_run_without_a_state_continues_the_last_run_of_its_directory(tmp_path: Path) -> None:
    StatisticsWriter(Journal(str(tmp_path), "former"), None).write(STATISTICS)
    with (tmp_path / "compression.jsonl").open("a") as stream:
        stream.write('{"step": 4, "byt')
    journal = Journal(str(tmp_path), "own")
    journal.adopt(None)
    assert journal.part.id == "former"


def test_a_truncated_line_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    StatisticsWriter(Journal(str(tmp_path), "run"), None).write(STATISTICS)
    with (tmp_path / "compression.jsonl").open("a") as stream:
        stream.write('{"step": 4, "byt')
    StatisticsWriter(Journal(str(tmp_path), "run"), None).write(replace(STATISTICS, step=5))
    assert [line["step"] for line in read(tmp_path)] == [3, 5]


def test_each_island_has_its_own_events_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for island in (0, 2):
        EventLog(Journal(str(tmp_path), "run"), writes=True, island=island).record(EVENT)
    first, other = (json.loads((tmp_path / place / "events.jsonl").read_text()) for place in ("", "island_0002"))
    assert (first["island"], other["island"]) == (0, 2)
    assert [text.partition("step")[0] for text in caplog.messages] == ["island 0: ", "island 2: "]


def write_all(journal: Journal, *steps: int) -> None:
    for step in steps:
        StatisticsWriter(journal, None).write(replace(STATISTICS, step=step))
        EventLog(journal, writes=True).record(replace(EVENT, step=step))


def test_a_full_disk_loses_only_lines(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "run")
    write_all(journal, 1)
    append = "deepspeed_compress.monitor.journal._append"
    with mock.patch(append, no_space), pytest.warns(CompressWarning, match="No space left") as caught:
        write_all(journal, 2, 3)
    write_all(journal, 4)
    assert [line["step"] for line in read(tmp_path)] == [1, 4]
    assert len(caught) == 1


def no_space(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line[:10])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.timeout(120)
def test_pipes_without_a_reader_do_not_block(tmp_path: Path) -> None:
    for name in ("compression.jsonl", "events.jsonl", "ds_config.json"):
        os.mkfifo(tmp_path / name)
    journal = Journal(str(tmp_path), "run")
    journal.adopt(None)
    with pytest.warns(CompressWarning, match="cannot be written") as caught:
        write_all(journal, 1, 2)
    journal.write_configuration({})
    assert len(caught) == 1


def test_new_files_are_private_and_existing_ones_keep_their_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "events.jsonl").touch()
    (shared / "events.jsonl").chmod(0o644)
    for directory in (shared, tmp_path / "new" / "run"):
        journal = Journal(str(directory), "run")
        write_all(journal, 1)
        journal.write_configuration({})
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {
        "shared": 0o755,
        "shared/compression.jsonl": 0o600,
        "shared/events.jsonl": 0o644,
        "shared/ds_config.json": 0o600,
        "new": 0o700,
        "new/run": 0o700,
        "new/run/compression.jsonl": 0o600,
        "new/run/events.jsonl": 0o600,
        "new/run/ds_config.json": 0o600,
    }


def test_two_jobs_may_write_to_one_directory(tmp_path: Path) -> None:
    """Lines stay complete and name their job, although both jobs write at the same time."""
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=write_many, args=(str(tmp_path), name)) for name in ("one", "other")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    found = [json.loads(line) for line in lines(tmp_path)]
    for name in ("one", "other"):
        steps = [line["step"] for line in found if line["run"]["id"] == name]
        assert steps == list(range(2000))


def write_many(directory: str, run: str) -> None:
    journal = Journal(directory, run)
    for step in range(2000):
        journal.add("compression.jsonl", {"step": step})


def test_a_job_that_is_suspended_while_it_writes_does_not_block_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_compress.monitor.journal.PATIENCE", 0.2)
    journal = Journal(str(tmp_path), "run")
    write_all(journal, 1)
    with (tmp_path / "compression.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(CompressWarning, match="compression.jsonl cannot be written") as caught:
            write_all(journal, 2, 3)
    write_all(journal, 4)
    assert [line["step"] for line in read(tmp_path)] == [1, 4]
    assert len(caught) == 1


def test_an_error_of_a_monitoring_service_does_not_stop_training(tmp_path: Path) -> None:
    class Failing(Sink):
        def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
            raise ConnectionError("no such host")

    writer = StatisticsWriter(Journal(str(tmp_path), "run"), Failing())
    with pytest.warns(CompressWarning, match="no such host"):
        writer.write(STATISTICS)
    writer.write(STATISTICS)
    assert len(lines(tmp_path)) == 2


def test_the_written_configuration_has_no_secrets(tmp_path: Path) -> None:
    Journal(str(tmp_path)).write_configuration({"comet": {"api_key": "abc"}, "train_batch_size": 4})
    text = (tmp_path / "ds_config.json").read_text()
    assert json.loads(text) == {"comet": {"api_key": "***"}, "train_batch_size": 4}


def test_several_writers_append_lines_that_are_readable_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    for step in (1, 2, 3):
        StatisticsWriter(Journal(str(directory), "run"), None).write(replace(STATISTICS, step=step))
        assert [json.loads(line)["step"] for line in lines(directory)] == list(range(1, step + 1))


def test_without_a_directory_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    StatisticsWriter(Journal(None), None).write(STATISTICS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["", '{"step": 1}\n', '{"step": 1, "run": 3}\n', "?\n", '"text"\n', None])
def test_a_run_keeps_its_id_if_no_previous_run_is_found(last: str | None, tmp_path: Path) -> None:
    if last is not None:
        (tmp_path / "compression.jsonl").write_text(last)
    journal = Journal(str(tmp_path), "own")
    journal.adopt(None)
    assert journal.part.id == "own"


def test_an_unwritable_file_leads_to_one_warning_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(str(tmp_path / "file" / "run"), "run")
    with pytest.warns(CompressWarning, match="monitor/path.*cannot be written") as caught:
        write_all(journal, 1, 2)
    journal.write_configuration({})
    assert len(caught) == 1


def test_a_deleted_directory_is_created_again(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "run"), "run")
    write_all(journal, 1)
    shutil.rmtree(tmp_path / "run")
    write_all(journal, 2)
    assert [line["step"] for line in read(tmp_path / "run")] == [2]
