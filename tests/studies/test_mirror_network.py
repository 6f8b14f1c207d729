"""The study of mirrors: what it measures, its files, and its figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import read_ds_config
from deepspeed_compress.tools.bench.workload import stage_of
from launch.studies import mirror_network
from launch.studies.mirror_network import CASES, STEPS, TURNS, Case, Pair, main, summary

CASE = "ZeRO 1, 4 hosts"


def rows(seconds: float) -> list[dict[str, Any]]:
    return [
        {"contender": {"name": name}, "rate": rate, "step_s": {"median": seconds}}
        for name in ("deepspeed", "zero1_int4_weights")
        for rate in STEPS
    ]


def test_steps_are_measured_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Case] = []

    def emulated(case: Case, model: Path) -> list[list[dict[str, Any]]]:
        taken.append(case)
        return [rows((1.0, 1.4, 0.9)[len(taken) - 1])]

    sides = {"emulated": emulated, "mirrors": lambda *_: [rows(0.8), rows(1.1)]}
    monkeypatch.setattr(mirror_network, "SIDES", sides)
    monkeypatch.setattr(mirror_network, "enter_user_namespace", lambda _: None)
    given = ["--output-dir", str(tmp_path), "--only", CASE]
    assert main(given) == 0
    out = capsys.readouterr().out
    [file] = tmp_path.glob("*.json")
    assert [turn.keys() for turn in json.loads(file.read_text())] == [{"emulated", "mirrors"}] * TURNS
    assert f"| {CASE}, deepspeed | 100mbit | 1.000 | 0.950 | -5 % |" in out
    assert out.endswith("within 10 %: 6 of 6, median difference -5.0 %\n")
    assert main(given) == 0
    assert capsys.readouterr().out == out
    assert taken == [Case(1, 4)] * TURNS


def test_steps_that_differ_by_more_are_counted() -> None:
    pairs = [Pair("", "", 1.0, mirror) for mirror in (0.89, 0.91, 1.09, 1.3)]
    assert summary(pairs) == "within 10 %: 2 of 4, median difference +0.0 %"


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_configurations_have_the_stage_of_their_case(case: Case) -> None:
    assert stage_of(read_ds_config(case.config)) == case.zero
