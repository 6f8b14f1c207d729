"""Which rules are wanted for which file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import PurePath

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.rule import Rule

ALL = "ALL"
_REMARK = re.compile(r"(?<![\w-])ds-compress:[ \t]*noqa(?![\w-])(?::[ \t]*([\w-]+(?:,[ \t]*[\w-]+)*))?")


@dataclass(frozen=True, slots=True)
class Selection:
    """Rules by code, the beginning of a code, name, or ALL. The longest match of `select` and `ignore` decides."""

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    per_file: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is ignored besides in files whose name or path matches a pattern."""

    def choose(self, rules: Iterable[Rule], document: Document) -> list[Rule]:
        """The rules to apply to `document`."""
        per_file = (codes for pattern, codes in self.per_file.items() if file_matches(document.path, pattern))
        ignored = [code for codes in (*per_file, ignored_inside(document)) for code in codes]
        return [
            rule
            for rule in rules
            if matches(rule, self.select) > matches(rule, self.ignore) and not matches(rule, ignored)
        ]


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
    """What the file itself says, under `deepspeed_compress.tools.lint.ignore` or in a remark."""
    ignore = document.get("deepspeed_compress", "lint", "ignore")
    section = [code for code in ignore if isinstance(code, str)] if isinstance(ignore, list) else []
    return (*section, *ignored_by_remarks(document))


def ignored_by_remarks(document: Document) -> tuple[str, ...]:
    """What `ds-compress: noqa: DSC201` says in a comment, or in JSON, which has none, under a key such as "//"."""
    remarks = (re.split(r",[ \t]*", found[1] or ALL) for found in _REMARK.finditer(document.text))
    return tuple(code for codes in remarks for code in codes)


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


def file_matches(path: str, pattern: str) -> bool:
    """Whether the name of a file, or the end of its path, is as `pattern` says."""
    pure = PurePath(path)
    return fnmatch(pure.name, pattern) or fnmatch(pure.as_posix(), pattern) or fnmatch(pure.as_posix(), f"*/{pattern}")
