"""The study of versions: its rows and columns exist, and it reads test reports correctly."""

from pathlib import Path

import pytest

from deepspeed_compress.backends.deepspeed.seams import SUPPORTED
from launch.studies.versions import PARTS, ROOT, VERSIONS, Outcome, read_outcome, table

REPORT = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_of_a_column_exist(part: str) -> None:
    assert all((ROOT / file).is_file() for file in PARTS[part])


def test_the_oldest_supported_deepspeed_has_a_row() -> None:
    assert f"=={SUPPORTED[0]}" in {deepspeed for deepspeed, *_ in VERSIONS.values()}


def test_a_table_counts_failures_and_errors(tmp_path: Path) -> None:
    (tmp_path / "0.19.8-4-bits.xml").write_text(REPORT)
    assert read_outcome(tmp_path / "0.19.8-4-bits.xml") == Outcome(passed=4, failed=3, skipped=3)
    row = list(table(tmp_path, ["0.19.8"]))[-1]
    assert "| 0.19.8 | 2.13.0 | 5.23.0 | 1.15.0 | not run | 4 of 7, 3 skipped | not run |" in row
