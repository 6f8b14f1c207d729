"""The page of the linter and the pre-commit hook say what is so."""

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from deepspeed_compress.cli import main
from deepspeed_compress.lint.document import parse
from deepspeed_compress.lint.files import is_config
from deepspeed_compress.lint.options import FORMATS, FRAMEWORKS
from deepspeed_compress.lint.settings import find_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, containing: str = "") -> str:
    [found] = [text for name, text in BLOCKS if name == language and containing in text]
    return str(found)


def test_the_example_is_the_real_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2},\n  "bf16": {"enabled": true}\n}\n'
    Path("ds_config.json").write_text(text)
    command, _, shown = block("text").partition("\n")
    assert main(command.removeprefix("$ ds-compress ").split()) == 1
    assert capsys.readouterr().out == shown


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options <= set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert all(f"`{word}`" in PAGE for word in (*FORMATS, *FRAMEWORKS[1:]))


def test_the_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(block("toml"))
    assert find_settings(tmp_path).per_file_ignores == {"*zero3*.json": ("DSC4",)}


def test_the_hook() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    used = yaml.safe_load(block("yaml", "repos:"))["repos"][0]["hooks"][0]
    assert used["id"] == hook["id"]
    assert hook["entry"] == "ds-compress lint"
    names = ("ds_config.json", "a/ds_config_zero3.hjson", "a/my-deepspeed.json", "ds_zero2.json")
    assert all(re.search(hook["files"], name) and is_config(parse("", name)) for name in names)
    assert not any(re.search(hook["files"], name) for name in ("package.json", "ds_config.py", "ads_config.json"))


def test_the_workflow_runs_what_there_is() -> None:
    jobs = yaml.safe_load(block("yaml", "jobs:"))["jobs"]
    commands = [step["run"].split() for step in jobs["lint"]["steps"] if "ds-compress" in step.get("run", "")]
    assert [command[:2] for command in commands if command[0] != "pip"] == [["ds-compress", "lint"]] * 2
