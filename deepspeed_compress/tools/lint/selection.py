"""Selection of rules per file, by options, by suppressions in a file, and by settings in a TOML file.

Settings are the table `[tool.ds-compress.lint]` of pyproject.toml, or a TOML file that holds nothing else.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from deepspeed_compress.diagnostics import SEVERITIES, Severity
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.options import FRAMEWORKS, Framework
from deepspeed_compress.tools.lint.rule import LintRule

ALL = "ALL"
_CODE = re.compile(r"DSC[0-9]{1,9}")
_REMARK = re.compile(r"(?<![\w-])ds-compress:[ \t]*noqa(?![\w-])(?::[ \t]*([\w-]+(?:,[ \t]*[\w-]+)*))?")
OWN_FILE = ".ds-compress-lint.toml"
"""File with settings at its top level. It takes precedence over pyproject.toml."""
_PYPROJECT = "pyproject.toml"
_TABLE = ("tool", "ds-compress", "lint")


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of rules by code, prefix of a code, name or ALL. The longest match of `select` and `ignore` decides."""

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    per_file: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional rules to ignore in files whose name or path matches a pattern."""

    def choose(self, rules: Iterable[LintRule], document: Document) -> list[LintRule]:
        """Return the rules to apply to `document`."""
        per_file = (codes for pattern, codes in self.per_file.items() if file_matches(document.path, pattern))
        ignored = [code for codes in (*per_file, ignored_inside(document)) for code in codes]
        return [
            rule
            for rule in rules
            if matches(rule, self.select) > matches(rule, self.ignore) and not matches(rule, ignored)
        ]


def matches(rule: LintRule, codes: Iterable[str]) -> int:
    """Return how specifically one of `codes` refers to `rule`. 0 means not at all."""
    return max((_match(rule, code) for code in codes), default=0)


def _match(rule: LintRule, code: str) -> int:
    if code == ALL:
        return 1
    if code == rule.name:
        return len(rule.code) + 1
    return len(code) + 1 if len(code) >= 3 and rule.code.startswith(code) else 0


def ignored_inside(document: Document) -> tuple[str, ...]:
    """Return the rules that the file itself ignores, in `deepspeed_compress.lint.ignore` or in a comment."""
    ignore = document.get("deepspeed_compress", "lint", "ignore")
    section = [code for code in ignore if isinstance(code, str)] if isinstance(ignore, list) else []
    return (*section, *ignored_by_remarks(document))


def ignored_by_remarks(document: Document) -> tuple[str, ...]:
    """Return the codes in `ds-compress: noqa: DSC201`, in a comment or, in JSON, under a key such as "//"."""
    remarks = (re.split(r",[ \t]*", found[1] or ALL) for found in _REMARK.finditer(document.text))
    return tuple(code for codes in remarks for code in codes)


def check_codes(codes: Iterable[str], rules: Iterable[LintRule], place: str) -> tuple[str, ...]:
    """Return `codes` if each of them refers to a rule.

    Raises:
        ConfigError: One of them does not. The message starts with `place`.
    """
    rules, codes = tuple(rules), tuple(codes)
    for code in codes:
        if not any(_match(rule, code) for rule in rules):
            raise ConfigError(
                f"{place}: {code!r} is not a rule (allowed: codes, prefixes of codes, names, ALL). "
                f"Write {_nearest(code, rules)}; `ds-compress rule --all` lists all rules."
            )
    return codes


def _nearest(code: str, rules: Sequence[LintRule]) -> str:
    """Return the rule that `code` probably refers to. For a code, this is the nearest number in the same family."""
    upper = code.upper()
    if _CODE.fullmatch(upper):
        family = [rule.code for rule in rules if rule.code[3] == upper[3]] or [rule.code for rule in rules]
        return min(family, key=lambda known: abs(int(known[3:]) - int(upper[3:])))
    close = get_close_matches(code, [name for rule in rules for name in (rule.code, rule.name)], n=1)
    return close[0] if close else f"{rules[0].code}, or {rules[0].name}"


def file_matches(path: str, pattern: str) -> bool:
    """Return True if `pattern` matches the name of a file or the end of its path."""
    pure = PurePath(path)
    return fnmatch(pure.name, pattern) or fnmatch(pure.as_posix(), pattern) or fnmatch(pure.as_posix(), f"*/{pattern}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from a file. Command-line options take precedence."""

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
    """Return the settings in `start` or in the nearest directory above it that has any."""
    for directory in (start, *start.parents):
        for path in (directory / OWN_FILE, directory / _PYPROJECT):
            if path.is_file() and (table := _table(path)) is not None:
                return _settings(table, path)
    return Settings()


def read_settings(path: Path) -> Settings:
    """Return the settings in `path`.

    Raises:
        ConfigError: The file does not exist or has no settings.
    """
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file. Write the path of a TOML file with settings.")
    table = _table(path)
    if table is None:
        raise ConfigError(f"--config {path}: no table [{'.'.join(_TABLE)}]. Write it there, or name another file.")
    return _settings(table, path)


def _table(path: Path) -> Any:
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
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
