"""Selection of slow tests and of the emulated processor: the same commit always gives the same ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.selection import (
    PROCESSORS,
    changed,
    environment_of,
    head,
    in_share,
    processor_features,
    processor_of,
)

ROOT = Path(__file__).parents[1]
COMMITS = [f"{number:040x}" for number in (0x7A0C, 0x7A0D, 0x7A0E)]


def test_commits_take_turns() -> None:
    chosen = [processor_of(commit, ["avx2"]) for commit in COMMITS]
    assert sorted(chosen) == sorted(PROCESSORS)
    assert chosen == [processor_of(commit, ["avx2"]) for commit in COMMITS]


def test_a_machine_without_avx2_does_not_emulate_it() -> None:
    assert {processor_of(commit, []) for commit in COMMITS} == {"native", "default"}


@pytest.mark.parametrize(("asked", "features"), [("avx2", []), ("avx9", ["avx2"]), ("", ["avx2"])])
def test_unavailable_processors_are_refused(asked: str, features: list[str]) -> None:
    with pytest.raises(ValueError, match=f"'{asked}' is neither of .*'default'"):
        processor_of(asked, features)


@pytest.mark.slow(3, "tests/support/selection.py", "tests/test_selection.py", "tests/conftest.py")
def test_torch_uses_the_selected_instructions() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    for name in {processor_of(name, processor_features()) for name in COMMITS} - {"native"}:
        environment = os.environ | environment_of(name)
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == name.upper()


def test_processors_share_no_compiled_code() -> None:
    """Code that torch generated for AVX-512 fails to build without vector instructions."""
    caches = [environment_of(name)["TORCHINDUCTOR_CACHE_DIR"] for name in PROCESSORS]
    assert len(set(caches)) == len(PROCESSORS)


def test_the_shares_of_all_commits_are_all_tests() -> None:
    tests = [f"tests/test_{number}.py::test_it" for number in range(300)]
    shares = [{test for test in tests if in_share(test, 3, commit)} for commit in range(3)]
    assert sorted(test for share in shares for test in share) == sorted(tests)
    assert all(len(share) > 60 for share in shares)
    assert {test for test in tests if in_share(test, 3, 10**40 + 3)} == {
        test for test in tests if in_share(test, 3, 10**40)
    }


def test_a_copy_without_git_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(selection, "_changed_files", selection._changed_files.__wrapped__)
    assert head() == "0"
    assert not changed(("tests", "deepspeed_compress"))


def test_a_test_without_sources_never_changes() -> None:
    assert not changed(())


def test_a_file_and_a_directory_of_a_changed_file_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_changed_files", lambda: ["tests/support/jobs.py"])
    assert all(changed((source,)) for source in ("tests/support/jobs.py", "tests/support", "tests"))
    assert not any(changed((source,)) for source in ("tests/support/job", "tests/supp", "jobs.py", ""))


MANY = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number): ...

@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(42))
def test_sampled(number): ...

@pytest.mark.sampled(4)
def test_alone(): ...

@pytest.mark.slow(10**9, "a source that has changed")
def test_changed(): ...
"""


def test_a_commit_chooses_the_same_tests_each_time(tmp_path: Path) -> None:
    file = tmp_path / "test_many.py"
    file.write_text(MANY)
    default, first, second, again, whole = collected(
        file,
        ("0", "not slow"),
        ("1", "not slow or due"),
        ("2", "not slow or due"),
        ("1", "not slow or due"),
        ("0", ""),
    )
    assert first == again != second
    assert default < first
    assert sum("test_sampled" in test for test in default) == 11
    assert "test_many.py::test_alone" in default
    assert "test_many.py::test_changed" in first - default
    assert len(whole) == 84


COLLECTS = """
import os, sys, pytest, tests.conftest
tests.conftest.changed = ("a source that has changed",).__eq__
file, *runs = sys.argv[1:]
for commit, selection in zip(runs[::2], runs[1::2]):
    os.environ["TESTS_COMMIT"] = commit
    print("RUN")
    assert pytest.main(["--collect-only", "-q", "-p", "tests.conftest", "-m", selection, file]) == 0
"""


def collected(file: Path, *runs: tuple[str, str]) -> list[set[str]]:
    """Return the ids of the tests of `file` that each pair of a commit and a selection chooses, without directories."""
    arguments = [one for run in runs for one in run]
    command = [sys.executable, "-c", COLLECTS, str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    outputs = done.stdout.split("RUN\n")[1:]
    return [{line.rpartition("/")[2] for line in output.splitlines() if "::" in line} for output in outputs]
