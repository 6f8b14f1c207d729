"""Environment variables that a program sets before it imports a library take effect under `ds-compress run`, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.integrations.patching import after_import, is_waiting
from tests.support.processes import run_command

SAMPLED = pytest.mark.sampled(4)

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, pathlib, sys
os.environ["HF_HOME"] = "/nowhere/home"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "7"
loaded = [name for name in ("torch", "deepspeed", "accelerate", "transformers") if name in sys.modules]
import transformers
from huggingface_hub import constants
directory = pathlib.Path(sys.argv[-1])
(directory / f"seen_{os.environ.get('RANK', '0')}.json").write_text(
    json.dumps({"loaded": loaded, "home": constants.HF_HOME, "offline": constants.HF_HUB_OFFLINE})
)
"""


def run(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "compress.json").write_text(json.dumps({SECTION: {}}))
    left_out = ("HF_HOME", "HF_HUB_OFFLINE", "RANK", "WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    return run_command("run", *options, tmp_path / "train.py", tmp_path, env={**environment, "PYTHONPATH": str(ROOT)})


@SAMPLED
@pytest.mark.parametrize(
    "options",
    [
        ["--launcher", "none"],
        ["--launcher", "none", "--section", "compress.json"],
        ["--restarts", "0", "--ranks", "1", "--section", "compress.json"],
    ],
    ids=["plain", "section", "restarts"],
)
def test_libraries_see_the_environment_of_the_program(options: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, *(str(tmp_path / option) if option == "compress.json" else option for option in options))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "seen_0.json").read_text())
    assert found == {"loaded": [], "home": "/nowhere/home", "offline": True}


MODULE = "value = 1\nloader = __spec__.loader\n"


class Action:
    """Action after an import that counts how often it is in effect."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, 0

    def __call__(self) -> "Action.undo":  # type: ignore[name-defined]
        assert sys.modules[self.name].value == 1
        self.done += 1
        return self.undo

    def undo(self) -> None:
        self.done -= 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_later.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_actions_run_after_the_import_of_their_module(module: str) -> None:
    finders, first, second = list(sys.meta_path), Action(module), Action(module)
    undo = [after_import(module, action) for action in (first, second)]
    assert is_waiting(Action)
    assert (first.done, second.done) == (0, 0)
    __import__(module)
    assert (first.done, second.done) == (1, 1)
    assert sys.meta_path == finders
    # Tools that look for the source of a module find its original loader.
    assert (
        type(sys.modules[module].loader).__name__ == type(sys.modules[module].__loader__).__name__ == "SourceFileLoader"
    )
    third = Action(module)
    after_import(module, third)()
    assert third.done == 0
    for one in undo:
        one()
    assert (first.done, second.done) == (0, 0)


def test_a_waiting_action_can_be_undone(module: str) -> None:
    finders, action = list(sys.meta_path), Action(module)
    after_import(module, action)()
    assert sys.meta_path == finders
    __import__(module)
    assert action.done == 0
