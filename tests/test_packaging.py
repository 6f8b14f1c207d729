"""The installed package: an sdist, a wheel built from it, and the wheel in an otherwise empty environment.

Packages come from pip's index. Everything is built once and then examined.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests/tools/doctor/runs"
MEGABYTE = 2**20
BEFORE = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
"""Packages that a new environment has."""
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Installed:
    """Environment into which `wheel`, built from `sdist`, was installed with its requirements."""

    sdist: Path
    wheel: Path
    environment: Path

    def run(self, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        # Use nothing of the current environment, neither the checkout nor a configuration in a parent directory.
        command = [str(self.environment / "bin" / arguments[0]), *map(str, arguments[1:])]
        return subprocess.run(command, capture_output=True, text=True, env=_alone(), cwd=cwd or self.environment)


def _alone() -> dict[str, str]:
    """Return the environment without variables that let Python find a checkout or limit name servers."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RES_OPTIONS"))}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    source, dist, environment = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "environment"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "deepspeed_compress", source / "deepspeed_compress", ignore=_caches)
    subprocess.run([sys.executable, "-c", BUILD_SDIST, str(dist)], cwd=source, check=True, stdout=subprocess.DEVNULL)
    [sdist] = dist.glob("*.tar.gz")
    _pip(dist, sys.executable, "wheel", "--no-deps", "--wheel-dir", str(dist), str(sdist))
    [wheel] = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    _pip(dist, str(environment / "bin/python"), "install", str(wheel))
    return Installed(sdist, wheel, environment)


_caches = shutil.ignore_patterns("__pycache__")


def _pip(directory: Path, python: str, *arguments: str) -> None:
    """Run pip in `directory`. In the checkout, or with it on the path, pip would consider the package installed."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_alone(), cwd=directory)
    assert done.returncode == 0, done.stderr


def test_both_archives_contain_all_files_of_the_package(installed: Installed) -> None:
    listed = ["git", "ls-files", "deepspeed_compress"]
    needed = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    assert {Path(file).suffix for file in needed} == {".py", ".cpp", ".h", ".json", ".css", ".jinja", ".js"}
    with zipfile.ZipFile(installed.wheel) as wheel, tarfile.open(installed.sdist) as sdist:
        assert needed - set(wheel.namelist()) == set()
        assert needed - {name.partition("/")[2] for name in sdist.getnames()} == set()


def test_the_environment_is_small_and_has_no_torch(installed: Installed) -> None:
    [packages] = installed.environment.glob("lib/*/site-packages")
    added = [place for place in packages.iterdir() if not place.name.startswith(BEFORE)]
    size = sum(file.stat().st_size for place in added for file in (place, *place.rglob("*")) if file.is_file())
    assert size < 60 * MEGABYTE
    assert not {"torch", "deepspeed", "numpy", "safetensors"} & {file.name for file in packages.iterdir()}


@pytest.mark.parametrize("name", ["initialize", "attach", "detach", "install"])
def test_an_entry_point_names_the_missing_extra(installed: Installed, name: str) -> None:
    done = installed.run("python", "-c", f"import deepspeed_compress; deepspeed_compress.{name}")
    assert done.returncode == 1
    assert 'pip install ".[train]" in a checkout of deepspeed_compress' in done.stderr.splitlines()[-1]


def test_help(installed: Installed) -> None:
    done = installed.run("ds-compress", "--help")
    assert done.returncode == 0, done.stderr
    assert "lint" in done.stdout


def test_lint(installed: Installed, tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs/zero1_int4_weights.json", tmp_path / "good.json")
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}')
    assert installed.run("ds-compress", "lint", "good.json", cwd=tmp_path).returncode == 0
    done = installed.run("ds-compress", "lint", "bad.json", cwd=tmp_path)
    assert (done.returncode, "DSC100" in done.stdout) == (1, True), done.stderr


def test_schema(installed: Installed) -> None:
    done = installed.run("ds-compress", "schema")
    assert "gradients" in json.loads(done.stdout)["properties"], done.stderr


def test_plan(installed: Installed) -> None:
    done = installed.run("ds-compress", "plan", "schedule", ROOT / "configs/zero2_topk.json", "--steps", "1000")
    assert done.returncode == 0, done.stderr
    assert "topk" in done.stdout


def test_report(installed: Installed, tmp_path: Path) -> None:
    runs = RUNS / "healthy-default", "--baseline", RUNS / "dense"
    done = installed.run("ds-compress", "report", *runs, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 0


def test_doctor(installed: Installed) -> None:
    done = installed.run("ds-compress", "doctor", RUNS / "excluded")
    assert "nothing-compressed" in done.stdout, done.stderr


def test_a_command_that_needs_torch_names_the_missing_extra(installed: Installed) -> None:
    done = installed.run("ds-compress", "bench", "kernels", "--numel", "1M")
    assert done.returncode == 1
    assert 'pip install ".[train]" in a checkout of deepspeed_compress' in done.stderr.splitlines()[-1]
