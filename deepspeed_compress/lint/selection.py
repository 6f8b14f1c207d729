"""Which rules are wanted for which file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import PurePath

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.rule import Rule

ALL = "ALL"


@dataclass(frozen=True, slots=True)
class Selection:
    """Rules by code, the beginning of a code, name, or ALL. The longest match of `select` and `ignore` decides."""

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    per_file: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is ignored besides in files whose name or path matches a pattern."""

    def wants(self, rule: Rule, document: Document) -> bool:
        """Whether to apply `rule` to `document`."""
        if matches(rule, self.select) <= matches(rule, self.ignore):
            return False
        ignored = (codes for pattern, codes in self.per_file.items() if _file_matches(document.path, pattern))
        return not any(matches(rule, codes) for codes in (*ignored, ignored_inside(document)))


def matches(rule: Rule, codes: Iterable[str]) -> int:
    """How exactly one of `codes` means `rule`: 0 is not at all."""
    return max((_match(rule, code) for code in codes), default=0)


def _match(rule: Rule, code: str) -> int:
    if code == ALL:
        return 1
    if code == rule.name:
        return len(rule.code) + 1
    return len(code) + 1 if len(code) >= 3 and rule.code.startswith(code) else 0


def ignored_inside(document: Document) -> tuple[str, ...]:
    """What the configuration itself says under `deepspeed_compress.lint.ignore`."""
    ignore = document.get("deepspeed_compress", "lint", "ignore")
    return tuple(code for code in ignore if isinstance(code, str)) if isinstance(ignore, list) else ()


def check_codes(codes: Iterable[str], rules: Iterable[Rule], place: str) -> tuple[str, ...]:
    """`codes`, each of which means a rule; ConfigError names `place` otherwise."""
    rules, codes = tuple(rules), tuple(codes)
    for code in codes:
        if not any(_match(rule, code) for rule in rules):
            known = [name for rule in rules for name in (rule.code, rule.name)]
            close = get_close_matches(code, known, n=1) or [f"{rules[0].code}, or {rules[0].name}"]
            raise ConfigError(
                f"{place}: {code!r} is not a rule (allowed: codes, beginnings of codes, names, ALL). "
                f"Write {close[0]}; `ds-compress rule --all` lists all rules."
            )
    return codes


def _file_matches(path: str, pattern: str) -> bool:
    """Whether the name of a file, or the end of its path, is as `pattern` says."""
    pure = PurePath(path)
    return fnmatch(pure.name, pattern) or fnmatch(pure.as_posix(), pattern) or fnmatch(pure.as_posix(), f"*/{pattern}")
