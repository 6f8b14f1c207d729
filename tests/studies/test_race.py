"""The race of adaptive against fixed settings: its sections are valid, and finished runs are compared correctly."""

import json
import re
from pathlib import Path

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.time_to_loss import TimedRun
from launch.studies.race import ADAPTIVE, BASELINE, FILE, PAIRS, report, section_of
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, start
from tests.support.jobs import run as train

SAMPLED = pytest.mark.sampled(3)


@pytest.mark.parametrize("name", PAIRS)
def test_its_sections_are_valid_and_differ_only_in_settings(name: str) -> None:
    assert not find_problems(json.loads(FILE.read_text()) | {SECTION: section_of(name)}, 2)
    assert section_of(name).keys() - section_of(BASELINE).keys() == ({"adaptive"} if name == ADAPTIVE else set())


def losses(rank: int, job: Job) -> tuple[list[float], str]:
    engine = start(job)
    return train(engine, data(rank, job)), engine.compression.settings


@SAMPLED
@pytest.mark.parametrize("name", PAIRS)
def test_its_sections_train(name: str) -> None:
    found = run_forks(2, losses, Job(1, section_of(name), steps=4))
    assert all(loss == loss for every, _ in found for loss in every)
    assert len({settings for _, settings in found}) == 1


def run(name: str, *points: tuple[float, float]) -> TimedRun:
    return TimedRun(name, points, 0.5, None)


def test_the_ratio_is_to_the_best_fixed_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        BASELINE: run(BASELINE, (10.0, 6.0), (20.0, 5.0)),
        "coarse": run("coarse", (10.0, 6.0), (14.0, 4.0)),
        "never": run("never", (10.0, 6.0)),
        ADAPTIVE: run(ADAPTIVE, (9.0, 6.0), (15.0, 4.0)),
    }
    # Halfway between two evaluations each: 12 and 12 seconds.
    assert report("1gbit", runs, BASELINE, tmp_path / "race.json") == pytest.approx(1.0)
    out = capsys.readouterr().out
    assert re.search(r"never +6\.0000 +0\.500 +- +-", out)
    assert "took 1.000 of the time of coarse (goal: 1.03; met)" in out
    slow = runs | {ADAPTIVE: run(ADAPTIVE, (9.0, 6.0), (18.0, 4.0))}
    assert report("1gbit", slow, BASELINE, tmp_path / "race.json") == pytest.approx(13.5 / 12)
    assert "1.03; missed)" in capsys.readouterr().out
    assert json.loads((tmp_path / "race.json").read_text())["best"] == "coarse"
