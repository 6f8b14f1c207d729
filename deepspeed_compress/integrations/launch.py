"""Command that `ds-compress run` starts: a launcher's own command, with our runner in front of the script."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from deepspeed_compress.errors import ConfigError

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
