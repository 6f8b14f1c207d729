"""The study of versions: its rows and columns exist, and it reads test reports correctly."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_compress.backends.deepspeed.seams import SUPPORTED
from launch.studies import versions
from launch.studies.versions import PARTS, ROOT, VERSIONS, Outcome, read_outcomes, run, table

NAME = "test_training_is_deepspeeds_to_the_bit[1-fp32]"
CASE = f'<testcase classname="tests.backends.deepspeed.test_ownership" name="{NAME}">'
REFUSED = "UnsupportedError: this engine cannot be compressed:\n- a setting needs deepspeed&gt;=0.19.8"
REPORT = f"""<testsuites><testsuite>
{CASE}</testcase>{CASE}</testcase>{CASE}<skipped/></testcase>{CASE}<error/></testcase>
{CASE}<failure>AssertionError</failure></testcase>{CASE}<failure>{REFUSED}</failure></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_of_a_column_exist(part: str) -> None:
    for file, function in (test.split("::") for test in PARTS[part]):
        assert f"def {function}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_all_cases_exist() -> None:
    """Otherwise pytest runs none of them."""
    cases = [f"{test}[{case}]" for tests in PARTS.values() for test, names in tests.items() for case in names]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *cases]
    subprocess.run(command, cwd=ROOT, check=True)


def options(directory: Path, minutes: float) -> argparse.Namespace:
    return argparse.Namespace(output_dir=directory, keep=False, minutes=minutes)


@pytest.mark.slow
def test_a_row_that_cannot_be_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "VERSIONS", {"none": ("==0", "==0", "==0", "==0")})
    monkeypatch.setattr(versions, "_pip", lambda python: [sys.executable, "-c", "raise SystemExit(3)"])
    run("none", options(tmp_path, 5))
    assert "none: " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_row_ends_in_time_with_all_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that the tests have started does not outlive them."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "complete").touch()
    (tmp_path / "slow" / "bin").mkdir()
    script = tmp_path / "slow" / "bin" / "python"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(versions, "VERSIONS", {"slow": ("", "", "", "")})
    run("slow", options(tmp_path, 0.02))
    assert "not finished within 0.02 minutes" in capfd.readouterr().err
    assert not (tmp_path / "slow").exists()
    # A killed process ends when it next gets a processor.
    process, deadline = Path("/proc", (tmp_path / "pid").read_text().strip()), time.monotonic() + 60
    while is_running(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process: Path) -> bool:
    """Return True if the process of this directory in /proc is neither a zombie nor gone."""
    try:
        return (process / "stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_oldest_supported_deepspeed_has_a_row() -> None:
    assert f"=={SUPPORTED[0]}" in {deepspeed for deepspeed, *_ in VERSIONS.values()}


def test_a_table_counts_refusals_apart_from_failures(tmp_path: Path) -> None:
    (tmp_path / "0.19.8.xml").write_text(REPORT)
    assert read_outcomes(tmp_path / "0.19.8.xml") == {"ownership": Outcome(passed=2, failed=2, skipped=1, refused=1)}
    row = list(table(tmp_path, ["0.19.8"]))[-1]
    assert "| 0.19.8 | 2.13.0 | 5.23.0 | 1.15.0 | not run | not run |" in row
    assert "| 2, 2 failed, 1 refused, 1 skipped |" in row
