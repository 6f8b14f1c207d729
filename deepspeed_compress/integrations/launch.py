"""Command that `ds-compress run` starts: a launcher's own command, with our runner in front of the script.

The DeepSpeed configurations that the command names are checked before anything is started.
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


def _starts_here(parsed: Any) -> bool:
    """Return False if DeepSpeed's launcher has a hostfile: its hosts may not have the same files as this one."""
    return not Path(getattr(parsed, "hostfile", None) or "").is_file()


_MODULE_SWITCHES = ("-m", "--module")


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
        raise ConfigError(
            f"--launcher {launcher}: {launcher} is not installed; install it with pip, or choose another launcher"
        )
    parsed = chosen.parse(arguments)
    if getattr(parsed, "no_python", False):
        raise ConfigError("--no_python: only Python programs can be compressed; start one, without this option")
    script = getattr(parsed, chosen.script)
    if not parsed.module and _starts_here(parsed) and not Path(script).is_file():
        path = which(script) or "the path of a Python script, or -m and a module"
        raise ConfigError(f"{script}: no such file; write {path}")
    begin = len(arguments) - len(getattr(parsed, chosen.rest)) - 1
    # argparse removes a "--" right after the script.
    begin -= arguments[begin] != script
    options = [option for option in arguments[:begin] if option not in _MODULE_SWITCHES]
    start = ["-m", chosen.module, *options, "--module", runner] if chosen.module else ["-m", runner]
    return [sys.executable, *start, *own, *(["-m"] if parsed.module else []), *arguments[begin:]]


OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "--deepspeed-config")
"""Options that pass a DeepSpeed configuration to scripts and launchers."""


def find_uncompressed(arguments: Sequence[str]) -> list[str]:
    """Return a message for each DeepSpeed configuration in `arguments` that has no section.

    Files that are missing or cannot be read are left for the program itself to report.
    """
    missing = ((file, find_missing(ds_config)) for file, ds_config in _read(arguments))
    return [f"{file}: nothing will be compressed: {problem}" for file, problem in missing if problem is not None]


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
    """Yield the files that `arguments` pass as DeepSpeed configurations."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        given = value if option in OPTIONS else argument if before in OPTIONS else ""
        if given and Path(given).is_file():
            yield Path(given)
        before = argument
