"""Selection of slow tests by what has changed, and of the emulated processor. Neither depends on a commit's hash."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.selection import (
    PROCESSORS,
    SlowTest,
    changed_paths,
    environment_of,
    processor_features,
    select,
    sources_of,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.slow("tests/conftest.py")
def test_torch_uses_the_selected_instructions() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    for name in {"default", *({"avx2"} & {*processor_features()})}:
        environment = os.environ | environment_of(name)
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == name.upper()


def test_processors_share_no_compiled_code() -> None:
    """Code that torch generated for AVX-512 fails to build without vector instructions."""
    caches = [environment_of(name)["TORCHINDUCTOR_CACHE_DIR"] for name in PROCESSORS]
    assert len(set(caches)) == len(PROCESSORS)


def slow(name: str, *sources: str, seconds: int = 1) -> SlowTest:
    return SlowTest(name, frozenset(sources), seconds)


def test_only_tests_with_changed_sources_are_due() -> None:
    tests = [slow("a", "package/a.py", "package"), slow("b", "package/b.py"), slow("c", "other")]
    assert select(tests, frozenset({"package/a.py", "package"})) == ({"a"}, ())
    assert select(tests, frozenset({"package/b.py", "package"})) == ({"a", "b"}, ())
    assert select(tests, frozenset()) == (frozenset(), ())
    assert select(tests, None) == ({"a", "b", "c"}, ())


def test_the_most_specific_tests_run_and_the_others_are_named() -> None:
    tests = [slow(f"wide[{number}]", "package") for number in range(9)]
    tests += [slow("broad", "package")]
    tests += [slow(f"narrow[{number}]", "package", "package/a.py") for number in range(3)]
    due, left_out = select(tests, frozenset({"package", "package/a.py"}), seconds=6)
    assert due == {"narrow[0]", "narrow[1]", "narrow[2]", "wide[0]", "wide[1]", "broad"}
    assert left_out == tuple(f"wide[{number}]" for number in range(2, 9))
    assert select(reversed(tests), frozenset({"package", "package/a.py"}), seconds=6) == (due, left_out)
    assert select(tests, frozenset({"package", "package/a.py"}), seconds=1).due == {"narrow[0]"}


def test_sources_are_the_package_directory_the_file_and_its_imports() -> None:
    sources = sources_of(ROOT / "tests" / "tools" / "lint" / "test_rules.py")
    assert {"deepspeed_compress/tools/lint", "tests/tools/lint/test_rules.py"} <= sources
    assert "deepspeed_compress/tools/lint/runner.py" in sources
    training = sources_of(ROOT / "tests" / "backends" / "deepspeed" / "test_weights_3.py")
    assert {"tests/support/jobs.py", "tests/support/forks.py", "deepspeed_compress/backends/deepspeed"} <= training
    assert "launch/studies" in sources_of(ROOT / "tests" / "studies" / "test_race.py")
    assert "deepspeed_compress" in sources_of(ROOT / "tests" / "attack" / "test_files.py")
    assert "deepspeed_compress/backends" in sources_of(ROOT / "tests" / "backends" / "test_ddp.py")


MANY = """
import pytest

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(42))
def test_sampled(number): ...

@pytest.mark.sampled(4)
def test_alone(): ...

@pytest.mark.slow("configs")
@pytest.mark.parametrize("number", range(60))
def test_of_files(number): ...
"""
"""Tests of the directory `deepspeed_compress/tools`. All test_of_files would take longer than CI has."""
OTHERS = """
import pytest

@pytest.mark.slow
def test_other():
    import deepspeed_compress.tools.module
    from tests.support import helper
"""
FILES: Mapping[str, str] = {
    "tests/tools/test_many.py": MANY,
    "tests/monitor/test_others.py": OTHERS,
    "tests/support/helper.py": "",
    "deepspeed_compress/tools/module.py": "",
    "deepspeed_compress/tools/other.py": "",
    "deepspeed_compress/monitor/clock.py": "",
    "configs/one.json": "{}",
    "README.md": "",
}
COLLECTS = """
import sys, pytest
from pathlib import Path
from tests.support import selection
selection.ROOT = Path(sys.argv[1])
arguments = ["--collect-only", "-q", "-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", *sys.argv[1:]]
assert pytest.main([*arguments, str(selection.ROOT / "tests")]) in (0, 5)  # all is well, or there is no test
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a small repository, whose second commit records that all tests passed at the first one."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    (tmp_path / selection.ALL_PASSED).write_text(git(tmp_path, "rev-parse", "HEAD"))
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a change")


def collected(root: Path, marks: str) -> tuple[set[str], str]:
    """Return the ids of the tests that a run with these marks would run, without directories, and all it prints."""
    command = [sys.executable, "-c", COLLECTS, str(root), "-m", marks]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return {line.rpartition("/")[2].partition("::")[2] for line in output.splitlines() if "::" in line}, output


def due_after(root: Path, *files: str) -> set[str]:
    """Return the functions of the slow tests that are due after a commit that changes files."""
    for file in files:
        (root / file).write_text(f"{(root / file).read_text()}\n")
    commit(root)
    return {name.partition("[")[0] for name in collected(root, "slow and due")[0]}


def test_a_default_run_has_a_share_of_the_cases(repository: Path) -> None:
    default, _ = collected(repository, "not slow")
    whole, _ = collected(repository, "")
    assert sum("test_sampled" in test for test in default) == 11
    assert len(default) == 12
    assert "test_alone" in default
    assert len(whole) == 42 + 1 + 1 + 60 + 1


@pytest.mark.sampled(3, "tests/conftest.py")
@pytest.mark.parametrize(
    ("file", "due"),
    [
        ("deepspeed_compress/tools/other.py", {"test_slow", "test_sampled", "test_of_files"}),
        ("deepspeed_compress/tools/module.py", {"test_slow", "test_sampled", "test_of_files", "test_other"}),
        ("deepspeed_compress/monitor/clock.py", {"test_other"}),
        ("tests/support/helper.py", {"test_other"}),
        ("tests/monitor/test_others.py", {"test_other"}),
        ("configs/one.json", {"test_of_files"}),
    ],
)
def test_a_change_makes_the_tests_of_its_file_due(repository: Path, file: str, due: set[str]) -> None:
    assert due_after(repository, file) == due


def test_a_copy_without_git_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert changed_paths.__wrapped__() is None
