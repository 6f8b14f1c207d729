import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_compress.monitor import KINDS, PHASES, Meter, StatisticsWriter, StepStatistics

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
    bytes_pipeline=700,
    bytes_tied=50,
    bytes_tensor=None,
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
LINE = {
    "step": 3,
    "samples": 96,
    "method": "blockwise",
    "rank": 2,
    "bytes_sent": 1000,
    "bytes_raw": 300,
    "bytes_uncompressed": 4000,
    "bytes_weights": 2000,
    "bytes_pipeline": 700,
    "bytes_tied": 50,
    "bytes_tensor": None,
    "ratio": 4.0,
    "compress_ms": 1.5,
    "communicate_ms": 20.0,
    "decompress_ms": 0.5,
    "residual_norm": 0.25,
    "cosine": None,
    "settings": "blockwise bits=4",
    "step_ms": 300.0,
    "busy_ms": 280.0,
    "busy_ms_median": 281.0,
    "busy_ms_max": 290.0,
    "slowest_rank": 3,
    "memory_bytes": 10**9,
    "grad_norm": 1.5,
    "loss": 5.25,
}
"""What the documentation promises to readers of compression.jsonl."""


class Sink:
    """What DeepSpeed's monitor does with events."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.events += event_list


def lines(directory: Path) -> list[str]:
    return (directory / "compression.jsonl").read_text(encoding="utf-8").splitlines()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_line_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    StatisticsWriter(str(tmp_path), None).write(STATISTICS)
    assert [json.loads(line) for line in lines(tmp_path)] == [LINE]


def test_lines_are_appended_across_writers_and_readable_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    for step in (1, 2, 3):
        StatisticsWriter(str(directory), None).write(replace(STATISTICS, step=step))
        assert [json.loads(line)["step"] for line in lines(directory)] == list(range(1, step + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: float) -> None:
    sink = Sink()
    StatisticsWriter(str(tmp_path), sink).write(replace(STATISTICS, residual_norm=value, cosine=value))
    [line] = lines(tmp_path)
    assert json.loads(line, parse_constant=refuse) == {**LINE, "residual_norm": None, "cosine": None}
    assert all(math.isfinite(number) for _, number, _ in sink.events)


def test_every_number_is_an_event_at_the_samples_seen() -> None:
    sink = Sink()
    StatisticsWriter(None, sink).write(STATISTICS)
    labels, unknown = ("step", "samples", "method", "rank", "settings", "slowest_rank"), ("bytes_tensor", "cosine")
    names = {name: value for name, value in LINE.items() if name not in labels + unknown} | {"time_ms": 22.0}
    assert sink.events == [(f"Train/Samples/compression_{name}", value, 96) for name, value in names.items()]


def test_a_disabled_sink_gets_nothing() -> None:
    sink = Sink(enabled=False)
    StatisticsWriter(None, sink).write(STATISTICS)
    assert sink.events == []


def test_without_a_directory_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    StatisticsWriter(None, None).write(STATISTICS)
    assert list(tmp_path.iterdir()) == []


def test_phases_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.25, 1.0, 1.5, 2.0, 2.125])
    monkeypatch.setattr("deepspeed_compress.monitor.meter.time.perf_counter", lambda: next(ticks))
    meter = Meter()
    for name in ("compress", "communicate", "compress"):
        with meter.phase(name, CPU):
            pass
    assert meter.milliseconds() == {"compress": 375.0, "communicate": 500.0, "decompress": 0.0}


def test_the_sizes_of_a_meter_are_the_bytes_of_a_line() -> None:
    sizes = Meter(bytes_sent=1, bytes_tensor=2).sizes()
    assert sizes == {name: {"bytes_sent": 1, "bytes_tensor": 2}.get(name, 0) for name in LINE if "bytes_" in name}
    assert set(KINDS) == sizes.keys() - {"bytes_raw", "bytes_uncompressed"}


def test_a_step_begins_with_an_empty_meter() -> None:
    meter = Meter(bytes_sent=1, bytes_uncompressed=2, bytes_weights=3, bytes_tied=4, cosine=0.5)
    with meter.phase("compress", CPU):
        pass
    meter.reset(timed=False)
    assert meter == Meter(timed=False)
    assert (meter.bytes_sent, meter.bytes_tied, meter.cosine) == (0, 0, None)
    assert set(meter.milliseconds().values()) == {0.0}


def test_phases_are_ranges_of_the_profiler() -> None:
    with torch.profiler.profile() as trace:
        for name in PHASES:
            with Meter().phase(name, torch.device("cpu")):
                torch.zeros(1)
    found = {event.key for event in trace.key_averages()}
    assert {f"deepspeed_compress.{name}" for name in PHASES} <= found
