"""Findings for recorded runs of two or four ranks: the planted fault comes first, and a healthy run has none.

The directory `runs` has the configuration, the statistics, the losses and the events of each.
"""

from pathlib import Path

import pytest

from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.doctor.case import Case, read_run
from deepspeed_compress.tools.doctor.command import Diagnosis, diagnose
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rules import RULES

RUNS = Path(__file__).parent / "runs"
FAULTS = {
    "forgetful-topk": "compression-too-strong",
    "late-topk": "compression-too-strong",
    "fast-learning": "diverging",
    "slow-network": "communication-bound",
    "micro-steps": "communication-bound",
    "dense-weights": "weights-uncompressed",
    "frozen-base": "frozen-weights-gathered",
    "plain-kernels": "slow-kernels",
    "costly-method": "compression-does-not-pay",
    "sleeping-rank": "straggler",
    "excluded": "nothing-compressed",
    "nervous-guard": "guard-fires-often",
    "other-data": "islands-drift-apart",
    "rare-exchanges": "islands-drift-apart",
    "too-far": "sync-every-too-long",
    "momentum-too-far": "sync-every-too-long",
    "late-island": "late-island",
    "far-behind": "old-rollouts",
    "costly-transform": "compression-bound",
    "bad-data": "skipped-steps",
}
"""First finding, by name of the run."""
HEALTHY = sorted({path.name for path in RUNS.iterdir()} - FAULTS.keys())
BASELINES = {"costly-method": "dense"}
NO_PATCH = {"slow-kernels", "straggler", "old-rollouts", "frozen-weights-gathered"}
"""Findings that no setting remedies, or only one that depends on the nodes, which a run does not name."""


def look(name: str) -> Diagnosis:
    other = BASELINES.get(name)
    return diagnose(Case(read_run(RUNS / name), read_run(RUNS / other) if other else None))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_the_first_finding_and_has_a_patch_if_a_setting_helps(name: str) -> None:
    diagnosis = look(name)
    [first, *_] = diagnosis.diagnostics
    assert first.name == FAULTS[name]
    assert (first.patch is None) == (first.name in NO_PATCH)
    lines = diagnosis.case.run.steps
    assert first.place.steps is not None
    assert lines[0]["step"] <= first.place.steps[0] <= first.place.steps[1] <= lines[-1]["step"]
    for diagnostic in diagnosis.diagnostics:
        assert diagnostic.patch is None or find_problems(apply(diagnosis.case.run.config, diagnostic.patch)) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_has_no_findings(name: str) -> None:
    assert [(diagnostic.name, diagnostic.message) for diagnostic in look(name).diagnostics] == []


def test_every_rule_has_a_recorded_run() -> None:
    assert {rule.name for rule in RULES} == set(FAULTS.values())
    assert len(HEALTHY) >= 9
