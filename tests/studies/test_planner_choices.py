"""The study of choices: what it measures, its files, and its figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Step
from launch.studies import planner_choices
from launch.studies.planner_choices import main

CASE = "ZeRO 1, 2x2, 100mbit"
SLOW = Constants(0.3, 1.5, 0.2, 4e-6, 0.7, 30.0, 1.5, 0.4, 0.5)


@dataclass(frozen=True)
class Found:
    constants: Constants
    steps: Sequence[Step] = ()
    corrections: Mapping[tuple[int, int, bool], float] = field(default_factory=dict)


def test_choices_are_measured_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Layout] = []

    def measure(layouts: Sequence[Layout], *given: object) -> Found:
        if planner_choices.STEPS in given:
            taken.extend(layouts)
            return Found(SLOW, [Step(layout, 2.0 if layout is taken[0] else 1.0) for layout in layouts])
        assert [(one.zero, one.shard_within, one.gradient_bits) for one in layouts] == [(1, 0, 0), (1, 0, 4), (1, 2, 3)]
        return Found(SLOW)

    monkeypatch.setattr(planner_choices, "measure", measure)
    monkeypatch.setattr(planner_choices, "enter_user_namespace", lambda _: None)
    given = ["--output-dir", str(tmp_path), "--only", CASE]
    assert main(given) == 0
    out = capsys.readouterr().out
    [file] = tmp_path.glob("*.json")
    names = [one["name"] for one in json.loads(file.read_text())["choices"]]
    assert names[0] == "now"
    assert len(names) == len(taken) > 3
    assert f"| {CASE} | " in out
    assert " | 0 % | " in out
    assert " | 2.00 |" in out
    assert "choice within 10 % of the best: 1 of 1" in out
    assert main(given) == 0
    assert capsys.readouterr().out == out
    assert len(taken) == len(names)
