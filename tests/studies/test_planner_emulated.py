"""The study of predicted and measured steps on emulated hosts: its cases, its files, and its figures."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Step
from launch.studies import planner_emulated
from launch.studies.planner_emulated import main

LAYOUT = Layout(tensor=1, pipeline=1, data=2, zero=0, micro=8, accumulation=1)


def test_an_interrupted_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Layout] = []

    def measure_step(layout: Layout, *_: object) -> Step:
        taken.append(layout)
        return Step(layout, 1.0)

    monkeypatch.setattr(planner_emulated, "measure_step", measure_step)
    monkeypatch.setattr(planner_emulated, "enter_user_namespace", lambda _: None)
    monkeypatch.setattr(planner_emulated, "MACHINES", ((2, 1), (2, 2)))
    monkeypatch.setattr(planner_emulated, "RATES", ("100mbit",))
    probes = [{"kind": "all_reduce", "sizes": [1e6, 2], "seconds": 1e-3}]
    for hosts in ("2x1", "2x2"):
        found = {"probes": probes, "steps": [{"layout": asdict(LAYOUT), "seconds": 0.1}], "rates": {}}
        (tmp_path / f"{hosts}.json").write_text(json.dumps(found))
    given = ["--output", str(tmp_path)]
    assert main([*given, "--most", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[4].startswith("4 rows: error ")
    assert main(given) == 0
    assert len(taken) == 10
    steps = [json.loads((tmp_path / f"{hosts}.json").read_text())["rates"]["100mbit"] for hosts in ("2x1", "2x2")]
    assert [[one["seconds"] for one in each] for each in steps] == [[1.0] * 5] * 2
    assert [Layout(**one["layout"]) for each in steps for one in each] == taken
    assert main([*given, "--summary"]) == 0
    assert capsys.readouterr().out.count("the chosen layout takes 0.0 % longer than the best") == 4
