"""The comparison of times to a loss: its settings are valid, and what it makes of the figures of a run."""

import json
from pathlib import Path

import pytest

from deepspeed_compress.config import SECTION, find_problems
from deepspeed_compress.tools.run_directory import METRICS
from launch.time_to_loss import FILES, REFERENCE, SECTIONS, curve, reached


@pytest.mark.parametrize("name", SECTIONS)
def test_its_settings_are_valid(name: str) -> None:
    ds_config = json.loads(FILES.get(name, Path("configs/zero1_int4_weights.json")).read_text())
    assert not find_problems(ds_config | ({SECTION: SECTIONS[name]} if SECTIONS[name] else {}))


def test_the_reference_is_uncompressed() -> None:
    assert SECTIONS[REFERENCE] == {"gradients": {"method": "none"}}


def test_time_is_that_of_steps_but_the_first(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "train_loss": 9.0, "step_time_s": 30.0},
        {"step": 2, "train_loss": 8.0, "step_time_s": 1.0},
        {"step": 2, "eval_loss": 8.5},
        {"step": 3, "train_loss": 7.0, "step_time_s": 2.0},
        {"step": 3, "eval_loss": 7.5},
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert curve(tmp_path) == [(1.0, 8.5), (3.0, 7.5)]


def test_the_time_to_a_loss_lies_between_evaluations() -> None:
    points = [(1.0, 8.0), (3.0, 7.0), (4.0, 7.5), (5.0, 6.0)]
    assert reached(points, 7.5) == 2.0
    assert reached(points, 8.0) == 1.0
    assert reached(points, 6.5) == pytest.approx(4.0 + 2 / 3)
    assert reached(points, 5.0) is None
