"""Fine-tuning frameworks train compressed by their own commands.

Each needs its environment, which `python -m launch.studies.frameworks --output-dir runs/frameworks` makes. The variable
`DS_COMPRESS_FRAMEWORKS` names another directory of environments.
"""

import argparse
import os
from dataclasses import astuple
from pathlib import Path

import pytest

from launch.studies.framework_jobs import FRAMEWORKS, STEPS, Command, Job, Paths
from launch.studies.frameworks import Environment, Run
from launch.studies.harness import ROOT

ENVIRONMENTS = Path(os.environ.get("DS_COMPRESS_FRAMEWORKS", ROOT / "runs/frameworks/environments"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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


PROBE = """
import atexit, os, sys

def report():
    if "RANK" in os.environ and SETTINGS in sys.argv:
        with open(FILE, "a") as file:
            file.write(f"{'deepspeed_compress.integrations.install' in sys.modules}\\n")

atexit.register(report)
"""


def test_ranks_of_axolotl_inherit_compression(tmp_path: Path) -> None:
    """axolotl trains on CUDA only, so its ranks end with an error."""
    job = Job("axolotl", "lora", 2, "4 bits")
    environment = run(job, tmp_path).environment
    paths = Paths(tmp_path / "toy", tmp_path)
    toy = (environment.python, "-m", "launch.studies.framework_toy", "make", str(paths.toy))
    assert environment.call(Command(toy, {}), tmp_path / "make.txt")[0] == 0
    words, variables = astuple(FRAMEWORKS[job.framework].train(job, paths))
    seen = tmp_path / "seen.txt"
    (tmp_path / "sitecustomize.py").write_text(
        PROBE.replace("FILE", repr(str(seen))).replace("SETTINGS", repr(str(tmp_path / "train.yaml")))
    )
    command = Command(("ds-compress", "run", *words), {**variables, "PYTHONPATH": f"{ROOT}:{tmp_path}"})
    environment.call(command, tmp_path / "log.txt")
    assert "True" in seen.read_text().splitlines()
    assert "False" not in seen.read_text()
