"""Edits and fixes change only the text and data that they concern, and are idempotent."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_compress.diagnostics import Diagnostic, Edit, Span, at, write
from deepspeed_compress.tools.lint.command import fix_of
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import Edits, apply, edited, fix, remove, rename, replace
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.lint.scanner import parse
from tests.support.properties import properties
from tests.tools.lint.texts import CONFIGS, REMOVED, STAGE, rule, walk

LINES = """{
  "a": 1, // one
  "b": {
    "c": 2
  },
  "d": [3]
}
"""
INLINE = '{"a": 1, "b": {"c": 2}, "d": [3]}'
HJSON = """# settings
a: one
b: {
  c: two
}
d: 3
"""


@pytest.mark.parametrize(
    ("text", "work", "result"),
    [
        (LINES, lambda d: remove(d, ("b",)), LINES.replace('  "b": {\n    "c": 2\n  },\n', "")),
        (LINES, lambda d: remove(d, ("d",)), LINES.replace(',\n  "d": [3]', "")),
        (LINES, lambda d: remove(d, ("a",)), LINES.replace('"a": 1, //', "//")),
        (LINES, lambda d: remove(d, ("b", "c")), LINES.replace('    "c": 2\n', "")),
        (LINES, lambda d: rename(d, ("b", "c"), "e"), LINES.replace('"c"', '"e"')),
        (LINES, lambda d: replace(d, ("d",), {"x": "y"}), LINES.replace("[3]", '{"x": "y"}')),
        (LINES, lambda d: replace(d, ("d", 0), 4), LINES.replace("3", "4")),
        (INLINE, lambda d: remove(d, ("a",)), '{"b": {"c": 2}, "d": [3]}'),
        (INLINE, lambda d: remove(d, ("b",)), '{"a": 1, "d": [3]}'),
        (INLINE, lambda d: remove(d, ("d",)), '{"a": 1, "b": {"c": 2}}'),
        (INLINE, lambda d: remove(d, ("b", "c")), '{"a": 1, "b": {}, "d": [3]}'),
        ('{"a": "s" b: 1}', lambda d: replace(d, ("a",), 7), '{"a": 7, b: 1}'),
        ('{"a": 1 /*,*/, "b": 2}', lambda d: remove(d, ("a",)), '{/*,*/ "b": 2}'),
        (HJSON, lambda d: remove(d, ("a",)), HJSON.replace("a: one\n", "")),
        (HJSON, lambda d: remove(d, ("d",)), HJSON.replace("\nd: 3", "")),
        ("a: one\nb: 2 # c\n", lambda d: remove(d, ("b",)), "a: one\n# c\n"),
        ('{"a": 1, // x\n "b": 2}', lambda d: remove(d, ("b",)), '{"a": 1 // x\n }'),
        ('{\n"a": 1,\r\n"b": 2\r\n}', lambda d: remove(d, ("a",)), '{\n"b": 2\r\n}'),
        ('{"a": 1, "a": 2}', lambda d: remove(d, ("a",), d.root.members[0]), '{"a": 2}'),
        ('{"a": 1, "a": 2}', lambda d: remove(d, ("a",)), '{"a": 1}'),
    ],
)
def test_edits(text: str, work: Callable[[Document], Edits], result: str) -> None:
    document = parse(text)
    assert edited(text, work(document)) == result
    assert not parse(result).problems


@pytest.mark.parametrize(
    "work",
    [
        lambda d: remove(d, ("x",)),
        lambda d: remove(d, ("d", 0)),
        lambda d: rename(d, ("x",), "y"),
        lambda d: replace(d, ("x",), 1),
        lambda d: replace(parse('{"a": 1, "a": 2}'), ("a",), 3),
    ],
)
def test_impossible_edits_are_empty(work: Callable[[Document], Edits]) -> None:
    assert work(parse(INLINE)) == ()
    assert fix("title", work(parse(INLINE))) is None


@properties
@given(CONFIGS, st.data())
def test_edits_change_the_data_as_they_say(text: str, data: st.DataObject) -> None:
    document = parse(text)
    assume(not document.problems)
    paths = [path for path, _ in walk(document.root)]
    # The last of equal keys is in force, and the one before it takes effect if the last is removed.
    assume(paths and len(paths) == len(set(paths)))
    path = data.draw(st.sampled_from(paths))
    changes: tuple[tuple[Edits, Callable[[Any], object]], ...] = (
        (remove(document, path), lambda holder: holder.pop(path[-1])),
        (replace(document, path, 7), lambda holder: holder.update({path[-1]: 7})),
        (rename(document, path, "new"), lambda holder: holder.update({"new": holder.pop(path[-1])})),
    )
    for edits, change in changes:
        after, expected = parse(edited(text, edits)), parse(text)
        if edits:
            change(expected.get(*path[:-1]) if path[:-1] else expected.data)
        assert not after.problems
        assert after.data == expected.data


def lint_with(*rules: Any) -> Callable[[Document], list[Diagnostic]]:
    return lambda document: lint_document(document, Context(), Selection(), rules)


def test_fixes_are_applied_one_after_the_other() -> None:
    document = parse('{"zero_optimization": {"stage": 5}, "amp": {}}')
    fixed = apply(document, lint_with(REMOVED, STAGE))
    assert fixed.text == '{"zero_optimization": {"stage": 3}}'
    assert (fixed.count, fixed.remaining) == (2, ())


def test_a_fix_that_would_break_the_syntax_is_left_out() -> None:
    def check(document: Document, context: Context) -> list[Diagnostic]:
        broken = fix("Break", (Edit(Span(0, 1), "["),))
        return [Diagnostic(at("a"), "wrong", write("right"), fix=broken)]

    document = parse('{"a": 1}')
    fixed = apply(document, lint_with(rule("DSC999", "breaks", check)))
    assert (fixed.text, fixed.count, len(fixed.remaining)) == ('{"a": 1}', 0, 1)


def test_derived_documents_are_not_fixed() -> None:
    document = Document("x", '{"amp": 1}', parse('{"amp": 1}').root, fixable=False)
    assert apply(document, lint_with(REMOVED)).text == document.text


FIXED = [rule for rule in RULES if fix_of(rule) is not None]
FILLER = st.sampled_from(("", " ", "\n", "\t", "\r\n", " // a comment\n", "/* b */", "\n# c\n"))


def spread(text: str, gaps: list[str]) -> str:
    """Return `text` with white space and comments before its outermost keys."""
    root = parse(text).root
    assert root is not None
    places = [member.key_span.start for member in root.members]
    edits = [Edit(Span(place, place), gap) for place, gap in zip(places, gaps, strict=False)]
    return edited(text, edits)


@settings(properties, max_examples=60)
@given(rule=st.sampled_from(FIXED), gaps=st.lists(FILLER, min_size=3, max_size=8))
def test_fixes_of_the_rules(rule: LintRule, gaps: list[str]) -> None:
    """White space and comments around keys do not matter to fixes."""
    document = parse(rule.wrong if parse(rule.wrong).problems else spread(rule.wrong, gaps))

    def lint(document: Document) -> list[Diagnostic]:
        return lint_document(document, Context(**rule.context), Selection(), (rule,))

    fixed = apply(document, lint)
    assert fixed.count >= 1
    assert not any(finding.fix for finding in fixed.remaining)
    assert len(fixed.document.problems) <= len(document.problems)
    assert apply(fixed.document, lint).text == fixed.text
