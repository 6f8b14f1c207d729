"""A part is a process: what it found stays, whatever becomes of it."""

import os
import re
import time
from pathlib import Path

import pytest

from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.parts import PARTS, Part, limits, run_part
from tests.support.processes import wait_until_gone

ROOT = Path(__file__).parents[3]
FIRST = 'yield Finding("first", "pass", "1", "2", part="not its own")'
SOURCE = f"""
import os, subprocess, sys, time
from deepspeed_compress.tools.gpu_check.findings import Finding

def findings(task):
    {FIRST}
"""


def run(tmp_path: Path, then: str, seconds: float = 60.0) -> list[Finding]:
    """What a part finds that finds `FIRST`, and does `then`."""
    (tmp_path / "odd_part.py").write_text(f"{SOURCE}    {then}\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    return run_part(Part("odd", "", 1.0, "odd_part"), Task("cpu", seconds, tmp_path), {"PYTHONPATH": path})


def test_what_a_part_finds_is_named_after_it(tmp_path: Path) -> None:
    assert run(tmp_path, "") == [Finding("first", "pass", "1", "2", part="odd")]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("raise ValueError('a wrong turn')", "status 1: .*ValueError: a wrong turn"),
        ("os.kill(os.getpid(), 11)", "crashed by SIGSEGV"),
        ("sys.exit(3)", "status 3"),
    ],
)
def test_a_crash_is_a_finding(tmp_path: Path, then: str, said: str) -> None:
    first, crash = run(tmp_path, then)
    assert (first.what, crash.verdict, crash.part) == ("first", "fail", "odd")
    assert re.search(said, crash.why, re.DOTALL)


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "child"
    (tmp_path / "child.py").write_text(
        f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(99)\n"
    )
    child = f"[sys.executable, {str(tmp_path / 'child.py')!r}]"
    begin = time.monotonic()
    first, hanging = run(tmp_path, f"subprocess.Popen({child}); time.sleep(99)", seconds=8.0)
    assert time.monotonic() - begin < 30
    assert (first.what, hanging.verdict) == ("first", "fail")
    assert hanging.why.startswith("ended at its limit of 8 s")
    wait_until_gone(int(file.read_text()))


def test_finding_nothing_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "empty_part.py").write_text("def findings(task):\n    return iter(())\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    [finding] = run_part(Part("odd", "", 1.0, "empty_part"), Task("cpu", 60, tmp_path), {"PYTHONPATH": path})
    assert (finding.verdict, finding.why) == ("fail", "it found nothing")


def test_a_task_survives_the_way_to_its_process(tmp_path: Path) -> None:
    task = Task("cuda", 12.5, tmp_path, small=True)
    assert Task.from_json(task.to_json()) == task


def test_all_parts_together_take_what_is_given() -> None:
    assert limits(PARTS, 8)["language_model"] == pytest.approx(480)
    assert limits(PARTS, 2)["kernels"] == pytest.approx(limits(PARTS, 8)["kernels"] / 4)
    assert list(limits(PARTS, 8).values()) == sorted(limits(PARTS, 8).values())


def test_a_part_alone_has_its_own_share() -> None:
    whole = limits(PARTS, 8)
    assert limits(PARTS[1:2], 8)["speed"] == pytest.approx(whole["speed"] - whole["kernels"])
