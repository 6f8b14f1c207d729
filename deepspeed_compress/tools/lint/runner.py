"""Selection of rules by options and by suppressions in a file, and their application to a document."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed_compress.diagnostics import Diagnostic, LineIndex, Place
from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.rules.accelerate import SECTION
from deepspeed_compress.tools.lint.scanner import parse

ALL = "ALL"
_ALWAYS = ("DSC0", "DSC73")
"""Rules of the syntax and of Accelerate's configuration, which also apply if there is none of DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of rules by code, prefix of a code, name or ALL. The longest match of `select` and `ignore` decides."""

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()

    def choose(self, rules: Iterable[LintRule], document: Document) -> list[LintRule]:
        """Return the rules to apply to `document`."""
        ignored = ignored_inside(document)
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
    """Return the rules that the file itself ignores, in `deepspeed_compress.lint.ignore`."""
    ignore = document.get("deepspeed_compress", "lint", "ignore")
    return tuple(code for code in ignore if isinstance(code, str)) if isinstance(ignore, list) else ()


def check_codes(codes: Iterable[str], rules: Iterable[LintRule], place: str) -> None:
    """Check that each of `codes` refers to a rule.

    Raises:
        ConfigError: One of them does not. The message starts with `place`.
    """
    rules = tuple(rules)
    for code in codes:
        if not any(_match(rule, code) for rule in rules):
            close = closest(code, [name for rule in rules for name in (rule.code, rule.name)], cutoff=0.6)
            raise ConfigError(
                f"{place}: {code!r} is not a rule (allowed: codes, prefixes of codes, names, ALL). "
                f"Write {close or f'{rules[0].code}, or {rules[0].name}'}; `ds-compress rule --all` lists all rules."
            )


class RuleError(CompressError):
    """Error raised if a rule fails, which is a defect of the linter and not of the configuration."""


def lint_text(text: str, path: str = "", context: Context | None = None) -> list[Diagnostic]:
    """Return the findings in the text of a configuration, in the order of its lines."""
    return lint_document(parse(text, path), context or Context(), Selection())


def lint_document(
    document: Document, context: Context, selection: Selection, rules: Sequence[LintRule] = RULES
) -> list[Diagnostic]:
    """Return the findings of `rules` in `document`, in the order of its lines."""
    lines = LineIndex(document.text)
    has_settings = document.readable and not document.has(SECTION)
    chosen = (rule for rule in rules if has_settings or rule.code.startswith(_ALWAYS))
    found = [
        # A document that cannot be edited gets no fix.
        replace(
            rule.attribute(one),
            place=document.locate(one.place, lines),
            fix=one.fix if document.fixable else None,
        )
        for rule in selection.choose(chosen, document)
        for one in _check(rule, document, context)
    ]
    return sorted(found, key=lambda one: (one.place.region.start, one.code))


def _check(rule: LintRule, document: Document, context: Context) -> list[Diagnostic]:
    try:
        found = list(rule.check(document, context))
    except Exception as error:
        raise RuleError(
            f"{document.path}: rule {rule.code} {rule.name} failed ({type(error).__name__}: {error}). "
            f"Write --ignore {rule.code} to go on without it, and report the file that it failed on."
        ) from error
    return [one for one in found if not document.problems or _is_read(document, one.place)]


def _is_read(document: Document, place: Place) -> bool:
    """Return True if the place of a finding has been read. After a syntax error, a missing key may merely be unread."""
    return place.span is not None or (bool(place.path) and document.has(*place.path))
