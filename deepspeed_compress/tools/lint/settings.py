"""Settings: the table `[tool.ds-compress.lint]` of pyproject.toml, or a TOML file that has nothing else."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.options import FRAMEWORKS, SEVERITIES, Framework, Severity

OWN_FILE = ".ds-compress-lint.toml"
"""Holds the settings at its top, and comes before pyproject.toml."""
_PYPROJECT = "pyproject.toml"
_TABLE = ("tool", "ds-compress", "lint")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a file of settings says; options of the command line take precedence."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    force_exclude: bool = False
    exit_on: Severity | None = None
    framework: Framework | None = None
    world_size: int | None = None
    ranks_per_node: int | None = None
    place: str = ""


def find_settings(start: Path) -> Settings:
    """The settings in `start`, or in the nearest directory above that has any."""
    for directory in (start, *start.parents):
        for path in (directory / OWN_FILE, directory / _PYPROJECT):
            if path.is_file() and (table := _table(path)) is not None:
                return _settings(table, path)
    return Settings()


def read_settings(path: Path) -> Settings:
    """The settings in `path`; ConfigError where it has none."""
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file. Write the path of a TOML file with settings.")
    table = _table(path)
    if table is None:
        raise ConfigError(f"--config {path}: no table [{'.'.join(_TABLE)}]. Write it there, or name another file.")
    return _settings(table, path)


def _table(path: Path) -> Any:
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Correct the file, which is read for settings of the linter.") from error
    for key in _TABLE if path.name == _PYPROJECT else ():
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _settings(table: Any, path: Path) -> Settings:
    place = f"{path}: [{'.'.join(_TABLE)}]" if path.name == _PYPROJECT else str(path)
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is {table!r}. Write a table.")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{place}: unknown key {key!r} (allowed: {', '.join(_KEYS)}). Write {close}.")
        known = _KEYS[key]
        if not known.accepts(value):
            raise ConfigError(f"{place}: {key} is {value!r} (allowed: {known.allowed}). Write {known.example}.")
        values[key.replace("-", "_")] = known.read(value)
    return Settings(**values, place=place)


@dataclass(frozen=True, slots=True)
class _Key:
    allowed: str
    example: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _tables_of_strings(value: Any) -> bool:
    return isinstance(value, dict) and all(_strings(item) for item in value.values())


def _tuples(value: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {pattern: tuple(codes) for pattern, codes in value.items()}


_KEYS = {
    "select": _Key("a list of rules", 'select = ["ALL"]', _strings, tuple),
    "ignore": _Key("a list of rules", 'ignore = ["DSC201"]', _strings, tuple),
    "per-file-ignores": _Key(
        "a table of file patterns and lists of rules", '"*zero3*.json" = ["DSC201"]', _tables_of_strings, _tuples
    ),
    "exclude": _Key("a list of file patterns", 'exclude = ["tests/*"]', _strings, tuple),
    "force-exclude": _Key("true, false", "force-exclude = true", lambda value: isinstance(value, bool)),
    "exit-on": _Key(", ".join(SEVERITIES), 'exit-on = "error"', lambda value: value in SEVERITIES),
    "framework": _Key(", ".join(FRAMEWORKS), 'framework = "hf"', lambda value: value in FRAMEWORKS),
    "world-size": _Key("a positive integer", "world-size = 8", _positive),
    "ranks-per-node": _Key("a positive integer", "ranks-per-node = 8", _positive),
}
