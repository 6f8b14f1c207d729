"""The study of predicted and measured steps on emulated hosts: its cases, its files, and its figures."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Step
from launch.studies import planner_emulated
from launch.studies.planner_emulated import Row, main, rank_correlation, summary

LAYOUT = Layout(tensor=1, pipeline=1, data=2, zero=0, micro=8, accumulation=1)


def row(predicted: float, measured: float, chosen: bool = False) -> Row:
    return Row("2x1,1gbit", LAYOUT, predicted, measured, chosen)


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


def test_the_summary_tells_error_order_and_regret() -> None:
    first, second, *lines = summary([row(1.0, 1.1, True), row(1.1, 1.0), row(2.2, 2.0)])
    assert first == "3 rows: error 10.0 % (median), 10.0 % (90th percentile), rank correlation 0.50"
    assert second == "2x1,1gbit: 3 rows, rank correlation 0.50, the chosen layout takes 10.0 % longer than the best"
    assert lines[0] == "  zero0-d2-b8x1: 1.1 s, predicted 1 s, -9 %"
    assert list(summary([])) == ["no rows"]


def test_ranks_correlate_whatever_the_scale() -> None:
    assert rank_correlation([row(10, 1), row(1000, 2), row(1001, 3)]) == pytest.approx(1.0)
