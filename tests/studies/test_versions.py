"""The study of versions: its rows and columns exist, and it reads test reports correctly."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_compress.backends.deepspeed.seams import SUPPORTED
from launch.studies.versions import PARTS, ROOT, VERSIONS, Outcome, read_outcomes, table

NAME = "test_training_is_deepspeeds_to_the_bit[1-fp32]"
CASE = f'<testcase classname="tests.backends.deepspeed.test_ownership" name="{NAME}">'
REFUSED = "UnsupportedError: this engine cannot be compressed:\n- a setting needs deepspeed&gt;=0.19.8"
REPORT = f"""<testsuites><testsuite>
{CASE}</testcase>{CASE}</testcase>{CASE}<skipped/></testcase>{CASE}<error/></testcase>
{CASE}<failure>AssertionError</failure></testcase>{CASE}<failure>{REFUSED}</failure></testcase>
</testsuite></testsuites>"""


@pytest.mark.slow
def test_all_cases_exist() -> None:
    """Otherwise pytest runs none of them."""
    cases = [f"{test}[{case}]" for tests in PARTS.values() for test, names in tests.items() for case in names]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *cases]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_oldest_supported_deepspeed_has_a_row() -> None:
    assert f"=={SUPPORTED[0]}" in {deepspeed for deepspeed, *_ in VERSIONS.values()}


def test_a_table_counts_refusals_apart_from_failures(tmp_path: Path) -> None:
    (tmp_path / "0.19.8.xml").write_text(REPORT)
    assert read_outcomes(tmp_path / "0.19.8.xml") == {"ownership": Outcome(passed=2, failed=2, skipped=1, refused=1)}
    row = list(table(tmp_path, ["0.19.8"]))[-1]
    assert "| 0.19.8 | 2.13.0 | 5.23.0 | 1.15.0 | not run | not run |" in row
    assert "| 2, 2 failed, 1 refused, 1 skipped |" in row
