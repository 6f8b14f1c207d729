"""The reader returns the values and errors of hjson, with their places, in bounded time."""

import json
import time
from typing import Any

import hjson  # type: ignore[import-untyped]
import pytest
from hypothesis import assume, example, given, settings

from deepspeed_compress.diagnostics import Place, at
from deepspeed_compress.tools.lint.document import Document, Node
from deepspeed_compress.tools.lint.scanner import MAX_DEPTH, MAX_INTEGER, MAX_PARTS, MAX_PROBLEMS, parse
from tests.support.properties import properties
from tests.tools.lint.texts import CONFIGS, NOISE, broken, walk

SAMPLED = pytest.mark.sampled(10)

MANY = settings(properties, max_examples=80)


def theirs(text: str) -> Any:
    """Return what hjson reads, or None if it fails with any exception."""
    try:
        return hjson.loads(text, object_pairs_hook=dict)
    except Exception:
        return None


def exact(value: object) -> str:
    return repr(value)


@MANY
@given(CONFIGS | broken() | NOISE)
@example("")
@example("\ufeff")
@example("\ufeffa: 1")
@example("{a: '''\n  x\n   y''' b: 1}")
@example("{\n  a:\n  '''\n  x\n   y\n  '''\n}")
@example("{'a': '''x'''}\n")
@example("{'a': '''x'''}")
@example('{"a": "\\u-123"}')
@example('{"a": "\\u 12"}')
@example("{a: \xa0}")
@example("{a:1 /*")
def test_reads_as_hjson_does_and_a_text_with_extensions_is_not_json(text: str) -> None:
    read, document = theirs(text), parse(text)
    ours = None if document.problems else document.data
    assert exact(ours) == exact(read if isinstance(read, dict) else None)
    if document.problems:
        return
    try:
        strict = json.loads(text)
    except ValueError:
        strict = None
    assert (strict is None) == bool(document.extensions)
    assert strict is None or strict == document.data


def all_nodes(node: Node) -> list[Node]:
    below = [member.value for member in node.members] + list(node.items)
    return [node, *(found for child in below for found in all_nodes(child))]


@MANY
@given(CONFIGS)
def test_the_text_of_a_span_is_the_value(text: str) -> None:
    document = parse(text)
    assume(document.root is not None and not document.problems)
    assert document.root is not None
    for node in all_nodes(document.root):
        found = text[node.span.start : node.span.end]
        # An unquoted string has another meaning if no line ends after it.
        assert found == node.value or exact(theirs(f"{{a: {found}\n}}")) == exact({"a": node.value})
    for _, member in walk(document.root):
        key = text[member.key_span.start : member.key_span.end]
        assert theirs(f"{{{key}: 1}}") == {member.key: 1}


CONFIG = """{
  "a": {"b": [1, {"c": null}]},
  "d": 2, "d": 3
}
"""


def test_lookups() -> None:
    document = parse(CONFIG, "x.json")
    assert document.get("a", "b", 0) == 1
    assert document.get("a", "b", 1, "c", default=5) is None
    assert document.get("a", "b", 2, default=5) == 5
    assert document.get("a", "b", "c", default=5) == 5
    assert document.get("d", "e", default=5) == 5
    assert document.get("d") == 3
    assert document.has("a", "b", 1, "c")
    assert not document.has("a", "c")
    assert not document.has("a", "b", -1)
    member = document.member("d")
    assert member is not None
    assert document.locate(at(span=member.key_span)).start == (3, 11)
    assert document.member("a", "x") is None
    assert document.member() is None
    assert [path for path, _ in walk(document.root)] == [("a",), ("a", "b"), ("a", "b", 1, "c"), ("d",), ("d",)]


@pytest.mark.parametrize(
    ("path", "on", "place"),
    [
        (("a", "b"), "key", '"b"'),
        (("a", "b"), "value", '[1, {"c": null}]'),
        (("a", "b", 0), "value", "1"),
        (("a", "missing"), "value", '"a"'),
        (("a", "b", 1, "missing", "more"), "key", '{"c": null}'),
        (("missing",), "value", "{"),
        ((), "value", "{"),
    ],
)
def test_places_in_the_text(path: tuple[str | int, ...], on: Any, place: str) -> None:
    span = parse(CONFIG).span_of(Place(path, on))
    assert CONFIG[span.start : span.end] == place


@pytest.mark.parametrize(
    ("text", "problems", "data"),
    [
        ('{"a": "b\n "c": 1}', ["2:7 this string has no end on its line"], {"c": 1}),
        ('{"a" 1, "b": 2}', ['1:6 no ":" behind the key "a"'], {"b": 2}),
        ('{"a": [1, 2}', ['1:7 "[" is not closed'], {"a": [1, 2]}),
        ('{"a": {"b": [1}, "c": 2}', ['1:13 "[" is not closed'], {"a": {"b": [1]}, "c": 2}),
        ('{"a": 1]}', ['1:8 "]" closes nothing'], {"a": 1}),
        ('{"a": }', ['1:7 "}" where a value should be'], {}),
        ('{"a": 1,, "b": 2}', ['1:9 "," where a key should be'], {"a": 1, "b": 2}),
        ('{"a": "\\q", "b": 2\n"c": 3}', ["1:8 \\q is not an escape"], {"c": 3}),
        ('{"a": "\t"}', ["1:8 '\\t' cannot stand in a string", '1:1 "{" is not closed'], {}),
        ('{"a": 1 /* b', ["1:9 this comment has no end", '1:1 "{" is not closed'], {"a": 1}),
        ('{"a": 1}}', ["1:9 text behind the end of the configuration"], {"a": 1}),
        ("{a: 1e400}", ["1:5 1e400 is too large a number"], {"a": 1.7976931348623157e308}),
        ("{a: -" + "9" * 5000 + "}", ["1:5 -99999999999"], {"a": -MAX_INTEGER}),
        ("[1]", [], {}),
        ("just words\n(and more)", ['1:1 "just" where a key should be'], {}),
        ("", [], {}),
    ],
)
def test_reading_continues_after_an_error(text: str, problems: list[str], data: dict[str, Any]) -> None:
    document = parse(text)
    places = [document.locate(problem.place).start for problem in document.problems]
    shown = [
        f"{line}:{column} {problem.message}" for (line, column), problem in zip(places, document.problems, strict=True)
    ]
    pairs = zip(sorted(shown), sorted(problems), strict=True)
    assert all(one.replace("1:7 this", "2:7 this").startswith(other) for one, other in pairs), shown
    assert document.data == data


def test_a_text_without_a_configuration_is_not_readable() -> None:
    assert not parse("just words").readable
    assert not parse("[1]").readable
    assert parse("").readable
    assert parse('{"a": 1').readable


MEGABYTES = 10 * 2**20
LARGE = {
    "brackets": "[" * MEGABYTES,
    "braces": '{"a":' * (MEGABYTES // 5),
    "commas": "{" + "," * MEGABYTES,
    "string": '{"a": "' + "b" * MEGABYTES + '"}',
    "quotes": '{"a": "' + "'" * MEGABYTES + '"}',
    "open comments": "/* a\n" * (MEGABYTES // 5),
    "comments": "#\n" * (MEGABYTES // 2),
    "unquoted": "{a: " + "b," * (MEGABYTES // 2),
    "numbers": '{"a": [' + "1," * (MEGABYTES // 2) + "1]}",
    "many lines in one": "{a: '''" + "\n " * (MEGABYTES // 2) + "'''}",
}


@SAMPLED
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_ten_megabytes(text: str) -> None:
    start = time.process_time()
    document = parse(text)
    for problem in document.problems:
        assert document.locate(problem.place).start
    assert time.process_time() - start < 10
    assert len(document.problems) <= MAX_PROBLEMS


def test_limits_are_reported() -> None:
    def problems(document: Document) -> list[str]:
        return [problem.message for problem in document.problems]

    assert problems(parse('{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH)) == []
    assert problems(parse('{"a": ' * (MAX_DEPTH + 1))) == [f"nested more than {MAX_DEPTH} deep"]
    assert problems(parse('{"a": [' + "1," * MAX_PARTS + "1]}")) == [f"more than {MAX_PARTS} values and comments"]


@pytest.mark.parametrize("count", [MAX_PROBLEMS - 2, MAX_PROBLEMS, 10 * MAX_PARTS])
def test_reading_stops_at_many_syntax_errors(count: int) -> None:
    messages = [problem.message for problem in parse('{"a": 1, ' + ":," * count + "}").problems]
    assert len(messages) == min(count, MAX_PROBLEMS)
    assert (messages[-1] == "more syntax errors") == (count >= MAX_PROBLEMS)
