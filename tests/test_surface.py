"""The public names, and what importing them costs."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepspeed_compress
from deepspeed_compress import errors
from deepspeed_compress.cli import COMMANDS
from tests.support.processes import run_python
from tests.support.runs import long_run

NAMES = [
    "CompressError",
    "CompressWarning",
    "ConfigError",
    "DataError",
    "IslandError",
    "RolloutError",
    "SeamError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "attach",
    "ddp",
    "detach",
    "fsdp2",
    "initialize",
    "install",
    "megatron",
]
LIGHT = [
    "deepspeed_compress",
    "deepspeed_compress.config",
    "deepspeed_compress.cli",
    "deepspeed_compress.monitor",
    "deepspeed_compress.policy",
    "deepspeed_compress.tools.lint",
    "deepspeed_compress.tools.lint.command",
    "deepspeed_compress.tools.bench.options",
    "deepspeed_compress.tools.services",
    "deepspeed_compress.tools.options",
    "deepspeed_compress.tools.plan",
    "deepspeed_compress.tools.report",
    "deepspeed_compress.tools.run",
    "deepspeed_compress.tools.run_directory",
    "deepspeed_compress.tools.schema",
    "deepspeed_compress.tools.doctor",
    "deepspeed_compress.tools.doctor.command",
]
HEAVY = {"torch", "deepspeed", "transformers", "numpy", "matplotlib", "safetensors"}
"""Packages that an installation without `[train]` and `[plot]` lacks."""
ROOT = Path(deepspeed_compress.__file__).parent


def test_public_names_are_frozen() -> None:
    assert sorted(deepspeed_compress.__all__) == NAMES, (
        "a public name was added or removed, and users rely on them: write it into NAMES in tests/test_surface.py, "
        "into docs/api.md and into CHANGELOG.md"
    )


def test_every_error_is_public() -> None:
    defined = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert defined == {name for name in NAMES if name.endswith(("Error", "Warning"))}
    assert all(getattr(deepspeed_compress, name) is getattr(errors, name) for name in defined)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Error")])
def test_every_error_is_a_compress_error(name: str) -> None:
    assert issubclass(getattr(errors, name), deepspeed_compress.CompressError)


@pytest.mark.slow
def test_an_engine_other_than_deepspeed_has_a_module_that_attaches() -> None:
    """Runs in a fresh interpreter. None of these modules loads DeepSpeed."""
    attach = "".join(f"deepspeed_compress.{name}.attach; " for name in sorted(deepspeed_compress._BACKENDS))
    program = f"import sys, deepspeed_compress; {attach}print('deepspeed' in sys.modules)"
    done = run_python("-c", program, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", sorted(deepspeed_compress._LOADED_ON_USE))
def test_a_name_loaded_on_use_is_public_in_its_part(name: str) -> None:
    place = ROOT.joinpath(*deepspeed_compress._LOADED_ON_USE[name].split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    [names] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert name in ast.literal_eval(names)


def test_only_public_names_are_loaded_on_use() -> None:
    lazy = deepspeed_compress._LOADED_ON_USE.keys() | deepspeed_compress._BACKENDS
    assert lazy == set(NAMES) - (vars(deepspeed_compress).keys() - deepspeed_compress._BACKENDS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="initialise"):
        _ = deepspeed_compress.initialise


@pytest.mark.parametrize("name", sorted(deepspeed_compress._LOADED_ON_USE.keys() | deepspeed_compress._BACKENDS))
def test_an_entry_point_without_torch_names_the_missing_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r'needs torch.*pip install -e ".*\[train\]"'):
        getattr(deepspeed_compress, name)


def test_importing_is_light() -> None:
    """Runs in a fresh interpreter. No heavy package is loaded."""
    program = f"import sys, {', '.join(LIGHT)}; print(*sys.modules)"
    loaded = run_python("-c", program, check=True, cwd=ROOT.parent)
    assert set(LIGHT) <= set(loaded.stdout.split())
    assert not HEAVY & set(loaded.stdout.split())


LIGHT_INSTALL = """
import sys
import tomllib

class WithoutHeavy:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HEAVY else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutHeavy(finder) for finder in sys.meta_path]
from deepspeed_compress.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Program in which the packages in HEAVY cannot be imported, as if they were not installed."""


def without_heavy(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    return run_python("-c", f"HEAVY = {HEAVY}{LIGHT_INSTALL}", *arguments, cwd=directory, env=environment)


@pytest.mark.parametrize(
    "arguments",
    [
        "check ds.json",
        "doctor run --json",
        "lint ds.json",
        "plan schedule ds.json",
        "report run --output out",
        "rule DSC201",
        "schema",
    ],
)
def test_a_command_runs_without_training_packages(arguments: str, tmp_path: Path) -> None:
    ds_config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "deepspeed_compress": {}}
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    long_run(tmp_path / "run", compressed=True)
    done = without_heavy(tmp_path, *arguments.split())
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout
    assert done.returncode in ((0, 1) if arguments.startswith("doctor") else (0,)), done.stdout + done.stderr


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_needs_nothing_that_trains(command: str, tmp_path: Path) -> None:
    assert without_heavy(tmp_path, command, "--help").returncode == 0


def test_the_command_that_installs_an_extra_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has the package, so it is installed from its checkout: this one, or one that the user has elsewhere."""
    command = errors.install_command("http")
    [place] = re.findall(r'pip install -e "(.*)\[http\]"', command)
    assert "http" in tomllib.loads((Path(place) / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "deepspeed_compress/errors.py"))
    assert errors.install_command("http") == 'pip install ".[http]" in a checkout of deepspeed_compress'


def test_nothing_advises_to_install_from_an_index() -> None:
    """Until the package is published."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [file for file in files if file.endswith((".py", ".md", ".sh", ".yaml")) and "tests/" not in file]
    pattern = re.compile(r"pip install ['\"]?deepspeed[-_]compress")
    assert [file for file in texts if pattern.search((ROOT.parent / file).read_text(encoding="utf-8"))] == []
