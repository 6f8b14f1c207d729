"""DeepSpeed configurations that a command names and that have no section: said before anything is started."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_compress.config import find_missing, read_ds_config
from deepspeed_compress.errors import ConfigError

__all__ = ["find_configurations", "find_uncompressed"]

OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "--deepspeed-config")
"""By which scripts and launchers are given the file."""


def find_uncompressed(arguments: Sequence[str]) -> list[str]:
    """For each file that `arguments` give as a DeepSpeed configuration, what is missing.

    Nothing for what is no file, or cannot be read: the program itself will speak of it.
    """
    found = []
    for file in find_configurations(arguments):
        try:
            problem = find_missing(read_ds_config(file))
        except ConfigError:
            continue
        if problem is not None:
            found.append(f"{file}: nothing will be compressed: {problem}")
    return found


def find_configurations(arguments: Sequence[str]) -> Iterator[Path]:
    """Files that `arguments` give as DeepSpeed configurations."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        given = value if option in OPTIONS else argument if before in OPTIONS else ""
        if given and Path(given).is_file():
            yield Path(given)
        before = argument
