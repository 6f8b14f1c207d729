"""Command that `ds-compress run` starts: a launcher's own command, with our runner in front of the script.

A program, such as `llamafactory-cli`, starts its ranks itself. They inherit compression (`integrations.install`). The
DeepSpeed configurations that the command names, also in a YAML file, are checked before anything is started.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import yaml

from deepspeed_compress.config import SECTION, find_missing, parse_section, read_ds_config
from deepspeed_compress.config.section import is_misspelled
from deepspeed_compress.errors import CompressWarning, ConfigError

RUNNER = "deepspeed_compress.integrations.run"


@dataclass(frozen=True)
class Launcher:
    """Launcher of training processes.

    Attributes:
        module: module that is started; "" if the script is started directly.
        parse: function that separates the launcher's options from those of the script.
        script: attribute of the parsed options that holds the script.
        rest: attribute of the parsed options that holds the script's arguments.
    """

    module: str
    parse: Callable[[Sequence[str]], Any]
    script: str
    rest: str


def _deepspeed(arguments: Sequence[str]) -> Any:
    from deepspeed.launcher.runner import parse_args

    return parse_args(arguments)


def _torchrun(arguments: Sequence[str]) -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


def _accelerate(arguments: Sequence[str]) -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(arguments)


def _none(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds-compress run --launcher none")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")
    return parser.parse_args(arguments)


LAUNCHERS: Mapping[str, Launcher] = {
    "deepspeed": Launcher("deepspeed.launcher.runner", _deepspeed, "user_script", "user_args"),
    "torchrun": Launcher("torch.distributed.run", _torchrun, "training_script", "training_script_args"),
    "accelerate": Launcher("accelerate.commands.launch", _accelerate, "training_script", "training_script_args"),
    "none": Launcher("", _none, "script", "rest"),
}


def launch_command(launcher: str, arguments: Sequence[str], runner: str = RUNNER, own: Sequence[str] = ()) -> list[str]:
    """Return the command for `arguments` of `launcher`, a key of `LAUNCHERS`.

    Everything is passed on unchanged, except the launcher's `--module`, which the runner takes instead.

    Args:
        launcher: key of `LAUNCHERS`.
        arguments: the launcher's options, a script, and the script's arguments.
        runner: module that runs the script in every process.
        own: options of the runner.

    Raises:
        ConfigError: if the launcher or the script is missing, or the program is not written in Python.
        SystemExit: if the launcher's own parser rejects the arguments.
    """
    chosen = LAUNCHERS[launcher]
    if chosen.module and find_spec(chosen.module.partition(".")[0]) is None:
        raise ConfigError(f"--launcher {launcher}: {launcher} is not installed; install it, or choose another")
    parsed = chosen.parse(arguments)
    if getattr(parsed, "no_python", False):
        raise ConfigError("--no_python: only Python programs can be compressed; start one, without this option")
    script = getattr(parsed, chosen.script)
    # The hosts of DeepSpeed's hostfile may not have the same files as this one.
    has_hosts = Path(getattr(parsed, "hostfile", None) or "").is_file()
    if not (parsed.module or has_hosts or Path(script).is_file()):
        path = which(script) or "the path of a Python script, or -m and a module"
        raise ConfigError(f"{script}: no such file; write {path}")
    begin = len(arguments) - len(getattr(parsed, chosen.rest)) - 1
    # argparse removes a "--" right after the script.
    begin -= arguments[begin] != script
    options = [option for option in arguments[:begin] if option not in ("-m", "--module")]
    start = ["-m", chosen.module, *options, "--module", runner] if chosen.module else ["-m", runner]
    return [sys.executable, *start, *own, *(["-m"] if parsed.module else []), *arguments[begin:]]


PROGRAM = "--program"
"""Option of the runner: what follows is a program and its arguments, not a script."""


def find_program(arguments: Sequence[str]) -> str | None:
    """Return the path of the program that `arguments` begin with; None if they begin with a script or an option.

    A program is found like a command of a shell. Fine-tuning frameworks, `torchrun` and `bash` are examples. A name
    that ends in `.py`, or that a file in the working directory has, is a script.
    """
    given = Path(arguments[0]) if arguments else Path()
    path = which(given.name)
    if path is None or given.suffix == ".py" or arguments[0].startswith("-"):
        return None
    is_it = given.samefile(path) if given.is_file() else given.name == arguments[0]
    return path if is_it else None


def program_command(program: str, arguments: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `program`, with the runner's options `own`."""
    return [sys.executable, "-m", RUNNER, *own, PROGRAM, program, *arguments]


OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "--deepspeed-config")
"""Options that pass a DeepSpeed configuration to scripts and launchers."""


def find_uncompressed(arguments: Sequence[str]) -> list[str]:
    """Return a message for each DeepSpeed configuration in `arguments` that has no section.

    Files that are missing or cannot be read are left for the program itself to report.
    """
    missing = ((file, find_missing(ds_config)) for file, ds_config in _read(arguments))
    return [
        *(f"{file}: nothing will be compressed: {problem}" for file, problem in missing if problem is not None),
        *(f"{name}: nothing will be compressed: {_SHIPPED}" for name in _names(arguments) if name in _ALIASES),
    ]


_ALIASES = frozenset(f"zero{stage}{offload}" for stage in range(4) for offload in ("", "_offload"))
"""Names of DeepSpeed configurations that ms-swift ships."""
_SHIPPED = "the framework's own configuration has no section; copy it, write the section, and name the copy"


def check_configurations(arguments: Sequence[str], allow_uncompressed: bool) -> None:
    """Check the sections of the DeepSpeed configurations that `arguments` name.

    A file with nothing like a section is accepted.

    Raises:
        ConfigError: if a section is invalid, or seems to be misspelled, so that training would not be compressed. With
            `allow_uncompressed`, a misspelled section is accepted.
    """
    for file, ds_config in _read(arguments):
        if SECTION in ds_config:
            _check_section(file, ds_config)
        elif is_misspelled(ds_config) and not allow_uncompressed:
            problem = f"{file}: nothing would be compressed: {find_missing(ds_config)}"
            raise ConfigError(f"{problem} Or pass --allow-uncompressed to train without compression.")


def _check_section(file: Path, ds_config: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            # The ranks report settings that have no effect.
            warnings.simplefilter("ignore", CompressWarning)
            parse_section(ds_config)
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError(f"{file}: {lines[1].strip(' -') if len(lines) == 2 else error}") from error


def _read(arguments: Sequence[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in find_configurations(arguments):
        try:
            ds_config = read_ds_config(file)
        except ConfigError:
            continue
        yield file, ds_config


def find_configurations(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the files that `arguments` pass as DeepSpeed configurations, themselves or in a framework's YAML file."""
    return (Path(name) for name in _names(arguments) if Path(name).is_file())


_KEY = "deepspeed"
"""Key of the DeepSpeed configuration in the files of LLaMA-Factory, ms-swift, axolotl and TRL."""
_SETTINGS = (".yaml", ".yml", ".json")
"""Endings of files with a framework's settings."""
_MAX_BYTES = 64 * 2**10
"""Maximum number of bytes of such a file. PyYAML is slow, and data files may be named, too."""


def _names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names of DeepSpeed configurations in `arguments`."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if value and option in (*OPTIONS, _KEY):
            yield value
        elif before in OPTIONS:
            yield argument
        elif argument.endswith(_SETTINGS):
            yield from _names_in(_settings(value or argument))
        before = argument


def _names_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of DeepSpeed configurations in settings of a framework, or of the Accelerate file they name."""
    for given in (settings, _settings(settings.get("accelerate_config"))):
        inside = given.get("deepspeed_config")
        names = (given.get(_KEY), inside.get("deepspeed_config_file") if isinstance(inside, dict) else None)
        yield from (name for name in names if isinstance(name, str))


def _settings(name: object) -> Mapping[str, Any]:
    """Return the settings in the file `name`, or none if it cannot be read."""
    try:
        file = Path(str(name))
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
