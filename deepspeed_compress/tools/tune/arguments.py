"""The command line of a trial: the user's, with the trial's file and directory in the place of the user's own."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed_compress.errors import ConfigError

__all__ = ["PLACEHOLDER", "excludes_momentum", "for_trial", "with_config"]

PLACEHOLDER = "{trial}"
"""Stands for the directory of the trial in any argument."""
OUTPUTS = ("--output_dir", "--output-dir", "--save_dir", "--save-dir")
"""Options by which scripts are told where to write: a trial must neither touch a run nor go on from it."""
FIRST_MOMENT = ("--adam_beta1", "--adam-beta1")


def with_config(arguments: Sequence[str], config: Path, replacement: Path) -> list[str]:
    """`arguments` with every one that names the file `config`, alone or after "--option=", naming `replacement`.

    Raises ConfigError when there is none.
    """
    named: list[str] = []

    def replaced(option: str, value: str) -> str:
        if not _names(value, config):
            return value
        named.append(value)
        return str(replacement)

    changed = _each_value(arguments, replaced)
    if not named:
        raise ConfigError(
            f"--config {config}: no argument of the command names this file, so trials cannot have files of their own "
            f"(allowed: any option). Write it where the script or the launcher reads it, such as SCRIPT --deepspeed "
            f"{config}; if the path stands inside the script, let the script take it from an argument."
        )
    return changed


def for_trial(arguments: Sequence[str], config: Path, ds_config: Path, directory: Path) -> list[str]:
    """`arguments` of a trial: it reads `ds_config` for `config`, and writes below `directory`. Raises ConfigError."""
    placed = [argument.replace(PLACEHOLDER, str(directory)) for argument in arguments]
    output = str(directory / "output")
    moved = _each_value(placed, lambda option, value: output if option in OUTPUTS else value)
    return with_config(moved, config, ds_config)


def excludes_momentum(arguments: Sequence[str]) -> bool:
    """Whether `arguments` tell Trainer's Adam to have no first moment."""
    given: list[str] = []

    def note(option: str, value: str) -> str:
        given.extend([value] * (option in FIRST_MOMENT))
        return value

    _each_value(arguments, note)
    return bool(given) and re.fullmatch(r"0+\.?0*|\.0+", given[-1]) is not None


def _each_value(arguments: Sequence[str], change: Callable[[str, str], str]) -> list[str]:
    """`arguments` with `change(option, value)` for each value; `option` is "" for what stands behind none."""
    changed: list[str] = []
    before = ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument.startswith("-"):
            changed.append(f"{option}={change(option, value)}" if equals else argument)
        else:
            changed.append(change(before, argument))
        before = argument if argument.startswith("-") and not equals else ""
    return changed


def _names(value: str, config: Path) -> bool:
    return bool(value) and Path(value).resolve() == config.resolve()
