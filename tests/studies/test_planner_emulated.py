"""The study of predicted and measured steps on emulated hosts: its cases, its file, and its figures."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Step
from launch.studies import planner_emulated
from launch.studies.planner_emulated import main, rank_correlation, summary


def row(name: str, measured: float, predicted: float, chosen: bool = False) -> dict[str, Any]:
    return {"name": name, "chosen": chosen, "measured": measured, "predicted": predicted}


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
    for hosts in ("2x1", "2x2"):
        found = {"gpu": "CPU", "constants": asdict(Constants(delay=30.0))}
        (tmp_path / f"constants_{hosts}.json").write_text(json.dumps(found))
    given = ["--output", str(tmp_path)]
    assert main([*given, "--most", "4"]) == 0
    assert main(given) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len({row["name"] for row in rows}) == len(rows) == len(taken) == 10
    assert [row["chosen"] for row in rows] == [True, *[False] * 4] * 2
    assert {layout.ranks for layout in taken} == {2, 4}
    assert main([*given, "--summary"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("10 rows: error ")


def test_the_summary_tells_error_order_and_regret() -> None:
    rows = [row("2x1,1gbit a", 1.1, 1.0, True), row("2x1,1gbit b", 1.0, 1.1), row("2x1,1gbit c", 2.0, 2.2)]
    first, second = summary(rows)
    assert first == "3 rows: error 10.0 % (median), 10.0 % (90th percentile)"
    assert second == "2x1,1gbit: 3 rows, rank correlation 0.50, the chosen layout takes 10.0 % longer than the best"
    assert list(summary([])) == ["no rows"]


def test_ranks_correlate_whatever_the_scale() -> None:
    assert rank_correlation([row("a", 1, 10), row("b", 2, 1000), row("c", 3, 1001)]) == pytest.approx(1.0)
    assert rank_correlation([row("a", 1, 3), row("b", 2, 2), row("c", 3, 1)]) == pytest.approx(-1.0)
