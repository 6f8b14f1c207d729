"""Records of this package's messages in DeepSpeed's communication logger."""

from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
from deepspeed.comm import comm

from deepspeed_compress.backends.deepspeed.byte_counts import NAMES
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, engines, run, statistics_lines

GRADIENTS, WEIGHTS = NAMES.values()
Records = dict[str, dict[int, dict[str, float]]]

EVERYTHING = {"enabled": True, "prof_all": True}
BOTH = {"weights": {"method": "blockwise"}}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "both": (EVERYTHING, BOTH),
    "nothing written": (EVERYTHING, {**BOTH, "monitor": {"every": 2}}),
    "warm-up": (EVERYTHING, {"schedule": {"warmup_steps": 2}}),
    "method none": (EVERYTHING, {"gradients": {"method": "none"}}),
    "off": (None, BOTH),
    "another operation": ({"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}, BOTH),
    "one of ours": ({"enabled": True, "prof_all": False, "prof_ops": [WEIGHTS]}, BOTH),
}
"""Configuration of the logger and additional keys of the section, by case."""


def job(directory: Path, logger: dict[str, Any] | None, section: dict[str, Any]) -> Job:
    monitor = {"path": str(directory), "every": 2}
    gradients = {"bits": 4, "block_size": 32}
    extra = {} if logger is None else {"comms_logger": logger}
    return Job(stage=1, steps=6, extra=extra, section={"gradients": gradients, "monitor": monitor, **section})


def records(rank: int, *jobs: Job) -> list[Records]:
    """Return this package's records in the logger after each job."""
    found = []
    for job, engine in engines(*jobs):
        run(engine, data(rank, job))
        # For the analysis of stragglers, the logger reduces over the ranks. This hangs if they have different records.
        summary = dist.log_summary(show_straggler=True, return_dict=True)["summary"]
        found.append({name: summary[name] for name in summary if name in NAMES.values()})
        comm.comms_logger.reset_data()
        comm.comms_logger.enabled = False
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[str, list[Records]]:
    """Return the records by case, and for each case by rank."""
    jobs = [job(directory / name, *case) for name, case in CASES.items()]
    by_rank = run_forks(2, records, *jobs)
    return dict(zip(CASES, zip(*by_rank, strict=True), strict=True))  # type: ignore[arg-type]


def test_nothing_needs_to_be_written_for_it(found: dict[str, list[Records]]) -> None:
    sizes = [{name: list(record) for name, record in found[case][0].items()} for case in ("nothing written", "both")]
    assert sizes[0] == sizes[1] != {}


def test_gradients_and_weights_have_records_of_the_size_that_is_sent(
    found: dict[str, list[Records]], directory: Path
) -> None:
    (first, second), lines = found["both"], statistics_lines(directory / "both")
    assert first.keys() == second.keys() == {GRADIENTS, WEIGHTS}
    for name, field in ((GRADIENTS, "bytes_sent"), (WEIGHTS, "bytes_weights")):
        [size] = first[name]
        assert [size] == list(second[name])
        # Rank 0 reports its own bytes. The other rank's part may be larger by some padding.
        assert 0 <= size - lines[0][field] <= 64
        assert first[name][size]["count"] == second[name][size]["count"] == len(lines) == 3


def test_records_share_the_time_of_communication(found: dict[str, list[Records]], directory: Path) -> None:
    sizes = [record for name in found["both"][0].values() for record in name.values()]
    waited = sum(line["communicate_ms"] for line in statistics_lines(directory / "both"))
    assert sum(record["total_latency_ms"] for record in sizes) == pytest.approx(waited, rel=0.01)


def test_a_warm_up_has_a_record_of_its_own_size(found: dict[str, list[Records]]) -> None:
    first, second = found["warm-up"]
    assert list(first[GRADIENTS]) == list(second[GRADIENTS])
    small, large = sorted(first[GRADIENTS])
    assert large > 5 * small
    assert [first[GRADIENTS][size]["count"] for size in (small, large)] == [2, 1]


@pytest.mark.parametrize(
    ("case", "names"),
    [("method none", set()), ("off", set()), ("another operation", set()), ("one of ours", {WEIGHTS})],
)
def test_the_logger_receives_our_collectives_as_configured(
    case: str, names: set[str], found: dict[str, list[Records]]
) -> None:
    for one in found[case]:
        assert one.keys() == names
