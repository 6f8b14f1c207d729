"""The choice of the tests of quick runs and of CI, and the emulated processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.emulated_processors import PROCESSORS, environment_of, processor_features
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
MANY = """
import pytest

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(42))
def test_sampled(number): ...

@pytest.mark.sampled(4)
def test_alone(): ...

@pytest.mark.case_a_stage
@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("stage", range(4))
def test_stages(stage, case): ...

@pytest.mark.serial
def test_serial(): ...
"""
RANKS = """
import pytest
from tests.support.forks import run_forks

@pytest.mark.parametrize("case", range(5))
def test_ranks(case): ...

@pytest.mark.slow
def test_slow_ranks(): ...

@pytest.mark.parametrize("case", range(5))
def test_ranks_too(case): ...

def test_ranks_once(): ...

def test_ranks_again(): ...
"""


@pytest.mark.slow
def test_torch_uses_the_selected_instructions() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    for name in {"default", *({"avx2"} & {*processor_features()})}:
        environment = os.environ | environment_of(name)
        run = run_python("-c", program, env=environment, check=True)
        assert run.stdout.strip() == name.upper()


def test_processors_share_no_compiled_code() -> None:
    """Code that torch generated for AVX-512 fails to build without vector instructions."""
    caches = [environment_of(name)["TORCHINDUCTOR_CACHE_DIR"] for name in PROCESSORS]
    assert len(set(caches)) == len(PROCESSORS)


@pytest.mark.parametrize(
    ("marks", "sampled", "stages", "ranks", "others"),
    [("not slow and not ci", 11, 4, 2, 1), ("not slow", 11, 4, 12, 2), ("", 42, 12, 13, 3)],
    ids=["quick", "CI", "all"],
)
def test_runs_have_shares_of_the_cases(
    tmp_path: Path, marks: str, sampled: int, stages: int, ranks: int, others: int
) -> None:
    (tmp_path / "test_many.py").write_text(MANY)
    (tmp_path / "test_programs.py").write_text(RANKS)
    options = ["--collect-only", "-q", "-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "-m", marks, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    collected = [line for line in printed.splitlines() if "::" in line]
    found = [sum(name in test for test in collected) for name in ("test_sampled", "test_stages", "ranks")]
    assert found == [sampled, stages, ranks]
    assert len(collected) == sum(found) + others


def test_the_arguments_of_the_script_choose_quick_tests_and_those_of_ci() -> None:
    assert '|| set -- -m "not slow and not ci"\n' in (ROOT / "tests/run.sh").read_text()
    assert 'tests/run.sh" -m "not slow" ' in (ROOT / ".ci/run").read_text()
