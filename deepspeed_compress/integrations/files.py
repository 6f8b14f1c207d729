"""Check of the DeepSpeed configurations that a command names, before anything is started."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION, find_missing, parse_section, read_ds_config
from deepspeed_compress.config.section import is_misspelled
from deepspeed_compress.errors import CompressWarning, ConfigError

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
