import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_compress import cli
from deepspeed_compress.cli import COMMANDS, main
from deepspeed_compress.config import SECTION
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.tools.schema import key_page


@pytest.fixture
def write(tmp_path: Path):
    """Write a DeepSpeed configuration and return its path."""

    def save(section: object, **native: object) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({**native, SECTION: section}))
        return str(path)

    return save


def below(command: cli.Command) -> Iterator[str]:
    """Return the names of the subcommands."""
    parser = argparse.ArgumentParser()
    cli._load(command.arguments)(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices


NAMES = [[], *([command.name] for command in COMMANDS)]
NAMES += [[command.name, name] for command in COMMANDS for name in below(command)]


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the examples in the help of a command."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return re.findall(r"^  (ds-compress .*)", capsys.readouterr().out.partition("\nexamples:\n")[2], re.MULTILINE)


def test_commands_of_the_second_level_are_found() -> None:
    for name in (["islands", "forget"], ["plan", "schedule"], ["checkpoint", "verify"], ["bench", "comm"]):
        assert name in NAMES


@pytest.mark.parametrize("arguments", NAMES, ids=" ".join)
def test_help_shows_examples_that_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    examples = shown(arguments, capsys)
    assert examples
    for example in examples:
        given = shlex.split(example)[1:]
        assert given[: len(arguments)] == arguments
        [command] = [command for command in COMMANDS if command.name == given[0]]
        cli._parser(command).parse_args(cli._separated(given, command))


def test_the_first_help_shows_five_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown([], capsys)) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["lintt"],
        ["check"],
        ["check", "a", "--world-size", "x"],
        ["lint", "--fixes"],
        ["bench"],
        ["bench", "steps"],
        ["bench", "step", "--output", "x.json"],
        ["bench", "step", "--config", "a.json", "--output", "x.json", "--peers", "horovod"],
        ["bench", "step", "--config", "a.json", "--output", "x.json", "--steps", "0"],
        ["bench", "kernels", "--device", "tpu"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    target = tmp_path / "schema.json"
    assert main(["schema", "--output", str(target)]) == 0
    assert json.loads(target.read_text()) == json_schema()
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == key_page()
    missing = tmp_path / "none" / "x"
    assert main(["schema", "--output", str(missing)]) == 1
    assert capsys.readouterr().err == f"ds-compress: error: {missing}: No such file or directory\n"


@pytest.mark.parametrize("arguments", ["schema", "lint README.md", "rule DSC100"])
def test_a_reader_that_has_gone_ends_the_command_silently(arguments: str) -> None:
    """As with `ds-compress schema | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "deepspeed_compress.cli", *arguments.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_that_cannot_be_written_is_an_error() -> None:
    command = [sys.executable, "-m", "deepspeed_compress.cli", "rule", "DSC100"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"ds-compress: error: [Errno 28] No space left on device\n")


def test_check_shows_the_section_with_its_defaults(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write({"preset": "auto", "parallelism": {"zero_stage": 2}, "seed": 1}, train_batch_size=8)
    assert main(["check", path, "--world-size", "4"]) == 0
    shown, _, ranks = capsys.readouterr().out.rpartition("}\n")
    section = json.loads(shown + "}")
    assert (section["seed"], section["gradients"]["bits"], section["monitor"]["every"]) == (1, 4, 1)
    assert ranks == "data-parallel size: 4 of 4 ranks\n"


def test_check_lists_every_error(write, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the section come first. The rest of the file is compared with a section that is valid."""
    parallelism = {"parallelism": {"zero_stage": 1, "tensor": 3}}
    for section, pointers in (
        ({"gradients": {"bits": 5, "bit": 4}, **parallelism}, ["gradients/bit", "gradients/bits"]),
        (parallelism, ["parallelism/zero_stage", "parallelism"]),
    ):
        assert main(["check", write(section, zero_optimization={"stage": 2}), "--world-size", "4"]) == 1
        lines = capsys.readouterr().out.splitlines()
        found = [line.split(": ")[1] for line in lines[:-1]]
        assert sorted(found) == sorted(f"/{SECTION}/{pointer}" for pointer in pointers)
        assert lines[-1].endswith("2 errors")


def test_check_of_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no_such_file.json"]) == 1
    assert "no_such_file.json: no such file" in capsys.readouterr().err


def test_ctrl_c_stops_without_a_traceback(
    write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deepspeed_compress.tools.schema.read_ds_config", pressed)
    assert main(["check", write({})]) == 130
    assert capsys.readouterr().err == "ds-compress: stopped\n"
