"""Fine-tuning frameworks train compressed by their own commands.

Each needs its environment, which `python -m launch.studies.frameworks --output-dir runs/frameworks` makes. The variable
`DS_COMPRESS_FRAMEWORKS` names another directory of environments.
"""

import argparse
import os
from pathlib import Path

import pytest

from launch.studies.framework_jobs import STEPS, Job
from launch.studies.frameworks import Environment, Run
from launch.studies.harness import ROOT

ENVIRONMENTS = Path(os.environ.get("DS_COMPRESS_FRAMEWORKS", ROOT / "runs/frameworks/environments"))

pytestmark = [pytest.mark.slow("deepspeed_compress/tools/run.py", "launch/studies"), pytest.mark.timeout(1200)]


def run(job: Job, directory: Path) -> Run:
    environment = Environment.of(job.framework, ENVIRONMENTS)
    if not (environment.directory / "complete").exists():
        pytest.skip(f"{environment.directory}: no environment with {environment.package}; see the docstring")
    return Run(job, environment, argparse.Namespace(output_dir=directory, minutes=10))


@pytest.mark.parametrize("framework", ["LLaMA-Factory", "ms-swift", "TRL"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_command_of_a_framework_is_compressed(framework: str, stage: int, tmp_path: Path) -> None:
    outcome = run(Job(framework, "lora", stage, "4 bits"), tmp_path).outcome()
    assert outcome.problem == ""
    assert len(outcome.losses) == STEPS
    assert outcome.ratio is not None
    assert outcome.ratio > 3
    assert outcome.change is not None
    assert outcome.change > 0
    assert outcome.merged is not None
    assert outcome.merged < 1e-4


def test_ranks_of_axolotl_inherit_compression(tmp_path: Path) -> None:
    """axolotl trains on CUDA only."""
    job = Job("axolotl", "lora", 2, "4 bits")
    started = run(job, tmp_path)
    outcome = started.outcome()
    assert outcome.problem
    log = (started.paths.run / "log.txt").read_text()
    assert "torch.distributed" in log
