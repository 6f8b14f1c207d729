"""Findings for recorded runs (`recordings.py`): the planted fault comes first, and a healthy run has none."""

import json
from pathlib import Path

import pytest

from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.diagnose import Diagnosis, diagnose
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rules import RULES
from deepspeed_compress.tools.doctor.run import read_run
from tests.tools.doctor.recordings import RECORDINGS, RUNS

FAULTY = sorted(name for name, recording in RECORDINGS.items() if recording.finds)
HEALTHY = sorted(RECORDINGS.keys() - set(FAULTY))


def look(name: str) -> Diagnosis:
    other = RECORDINGS[name].baseline
    return diagnose(Case(read_run(RUNS / name), read_run(RUNS / other) if other else None))


def test_exactly_the_listed_runs_are_recorded() -> None:
    assert sorted(path.name for path in RUNS.iterdir()) == sorted(RECORDINGS)
    assert len(FAULTY) >= 10
    assert len(HEALTHY) >= 5


@pytest.mark.parametrize("name", FAULTY)
def test_planted_fault_is_the_first_finding(name: str) -> None:
    diagnosis = look(name)
    assert [one.name for one in diagnosis.diagnostics][:1] == [RECORDINGS[name].finds]
    [first, *_] = diagnosis.diagnostics
    assert first.place.steps is not None
    lines = diagnosis.case.run.steps
    assert lines[0]["step"] <= first.place.steps[0] <= first.place.steps[1] <= lines[-1]["step"]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_has_no_findings(name: str) -> None:
    assert [(one.name, one.message) for one in look(name).diagnostics] == []


@pytest.mark.parametrize("name", FAULTY)
def test_every_patch_is_valid(name: str) -> None:
    diagnosis = look(name)
    assert diagnosis.obstacles == {}
    for one in diagnosis.diagnostics:
        assert one.patch is None or find_problems(apply(diagnosis.case.run.config, one.patch)) == []


NO_PATCH = {"slow-kernels", "straggler", "old-rollouts"}
"""Findings that no setting remedies."""


@pytest.mark.parametrize("name", FAULTY)
def test_finding_has_a_patch_if_a_setting_helps(name: str) -> None:
    assert (look(name).diagnostics[0].patch is None) == (RECORDINGS[name].finds in NO_PATCH)


def test_every_rule_has_a_recorded_run() -> None:
    assert {rule.name for rule in RULES} == {recording.finds for recording in RECORDINGS.values() if recording.finds}


@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_recorded_runs_are_small_and_contain_no_temporary_paths(name: str) -> None:
    files = list((RUNS / name).iterdir())
    assert sum(file.stat().st_size for file in files) < 25_000
    assert all("/tmp" not in file.read_text() for file in files)
    assert json.loads((RUNS / name / "summary.json").read_text())["steps"] == RECORDINGS[name].steps


@pytest.mark.slow
def test_a_recording_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tools.doctor import recordings

    monkeypatch.setattr(recordings, "RUNS", tmp_path)
    recordings.make("endless-warm-up")
    [found] = diagnose(Case(read_run(tmp_path / "endless-warm-up"))).diagnostics
    assert found.name == "never-in-force"
