"""The page of the linter and the pre-commit hook are correct."""

import io
import json
import re
from pathlib import Path

import pytest
import yaml

from deepspeed_compress.cli import main
from deepspeed_compress.tools.lint.options import FRAMEWORKS
from deepspeed_compress.tools.outputs.machine import FORMATS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, containing: str = "") -> str:
    [found] = [text for name, text in BLOCKS if name == language and containing in text]
    return str(found)


OFFLOADED = '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}'
FILES = {
    "ds_config.json": '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2},\n  "bf16": {}\n}\n',
    "ds_config_auto.json": json.dumps(
        {**dict.fromkeys(("train_batch_size", "gradient_clipping"), "auto"), "zero_optimization": {}}
    ),
    "many/ds_config_1.json": OFFLOADED,
    "many/ds_config_2.json": OFFLOADED.replace("{", '{"optimiser": {}, ', 1),
}


@pytest.mark.parametrize("example", [text for name, text in BLOCKS if name == "text"])
def test_the_examples_are_the_real_output(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    command, _, shown = example.partition("\n")
    assert main(command.removeprefix("$ ds-compress ").split()) == ("warning" in shown)
    written = capsys.readouterr()
    assert written.err + written.out == shown


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options <= set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert all(f"`{word}`" in PAGE for word in (*FORMATS, *FRAMEWORKS[1:]))


@pytest.mark.parametrize("command", [line.partition("#")[0].split() for line in block("bash").splitlines()])
def test_the_commands_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ds_config.json", "configs/ds_config.json", "default_config.yaml", "zero2.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 0}}')
    Path("default_config.yaml").write_text("deepspeed_config: {deepspeed_config_file: of_trainer.json}")
    Path("train.yaml").write_text("deepspeed: of_trainer.json")
    batch = '"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"'
    Path("of_trainer.json").write_text(f'{{"zero_optimization": {{"stage": 2}}, "gradient_clipping": "auto", {batch}}}')
    Path("zero2.yaml").write_text("train_batch_size: 8\nzero_optimization: {stage: 2}\noptimizer: {type: AdamW}\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"train_batch_size": 8}')))
    options = command[1 : command.index("<")] if "<" in command else command[1:]
    assert main(options) == 0
    assert "0 files" not in capsys.readouterr().out


def test_the_hook() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    used = yaml.safe_load(block("yaml", "repos:"))["repos"][0]["hooks"][0]
    assert used["id"] == hook["id"]
    assert hook["entry"].split() == ["ds-compress", "lint"]
    for name in ("ds_config.json", "a/ds_zero2.hjson", "deepspeed_config_1.json", "ds_config.yaml"):
        assert re.search(hook["files"], name)
    for name in ("package.json", "ds_configs/level.json", "deepspeed_results.json", "ds_config.py"):
        assert not re.search(hook["files"], name)


def test_the_commands_of_the_workflow_exist() -> None:
    jobs = yaml.safe_load(block("yaml", "jobs:"))["jobs"]
    commands = [step["run"].split() for step in jobs["lint"]["steps"] if "ds-compress" in step.get("run", "")]
    assert [command[:2] for command in commands if command[0] != "pip"] == [["ds-compress", "lint"]] * 2
