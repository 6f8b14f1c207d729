"""Each commit is tested as one kind of processor computes, the same one each time."""

import os
import subprocess
import sys

import pytest

from tests.support.rotation import PROCESSORS, environment_of, processor_features, processor_of

COMMITS = [f"{number:040x}" for number in (0x7A0C, 0x7A0D, 0x7A0E)]


def test_commits_take_turns() -> None:
    chosen = [processor_of(commit, ["avx2"]) for commit in COMMITS]
    assert sorted(chosen) == sorted(PROCESSORS)
    assert chosen == [processor_of(commit, ["avx2"]) for commit in COMMITS]


def test_a_machine_without_avx2_does_not_compute_as_if_it_had_it() -> None:
    assert {processor_of(commit, []) for commit in COMMITS} == {"native", "default"}


@pytest.mark.parametrize(("asked", "features"), [("avx2", []), ("avx9", ["avx2"]), ("", ["avx2"])])
def test_what_this_machine_cannot_run_is_refused(asked: str, features: list[str]) -> None:
    with pytest.raises(ValueError, match=f"'{asked}' is neither of .*'default'"):
        processor_of(asked, features)


def test_torch_computes_as_it_is_told() -> None:
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
