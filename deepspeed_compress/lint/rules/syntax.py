"""Syntax: what cannot be read, or is read by one program and not by the other."""

from collections.abc import Iterator

from deepspeed_compress.lint.document import Document, Node
from deepspeed_compress.lint.edits import fix, remove
from deepspeed_compress.lint.hit import Hit, Path
from deepspeed_compress.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.lint.rules.common import config, hugging_face, show
from deepspeed_compress.lint.templates import placeholders

_FAMILY = "syntax"


def _errors(document: Document, context: Context) -> Iterator[Hit]:
    yield from document.problems


def _not_an_object(document: Document, context: Context) -> Iterator[Hit]:
    root = document.root
    if root is not None and root.kind != "object":
        what = f"the outermost value is {show(root.value)} (allowed: an object)"
        yield Hit((), what, "the settings between braces", span=root.span)


def _duplicates(document: Document, context: Context) -> Iterator[Hit]:
    if document.root is not None:
        yield from _duplicates_in(document, document.root, ())


def _duplicates_in(document: Document, node: Node, path: Path) -> Iterator[Hit]:
    first: dict[str, object] = {}
    for member in node.members:
        place = (*path, member.key)
        if member.key in first:
            # Which of two different values was meant, only the user knows.
            removal = remove(document, place, member) if member.value.value == first[member.key] else ()
            what = f'key "{member.key}" stands here a second time (allowed: once)'
            correction = fix("Remove the second of two equal keys", removal)
            yield Hit(place, what, "one of the two only", "key", correction, member.key_span)
        first.setdefault(member.key, member.value.value)
        yield from _duplicates_in(document, member.value, place)
    for index, item in enumerate(node.items):
        yield from _duplicates_in(document, item, (*path, index))


_NAMES = {"byte-order-mark": "a byte order mark", "missing-braces": "no braces around the settings"}


def _only_hjson(document: Document, context: Context) -> Iterator[Hit]:
    if hugging_face(context):
        for extension in document.extensions:
            words = _NAMES.get(extension.kind, f"a {extension.kind.replace('-', ' ')}".replace("a un", "an un"))
            what = f"{words} is HJSON, which DeepSpeed reads and Hugging Face does not (allowed: JSON)"
            yield Hit((), what, "JSON", fix=extension.fix, span=extension.span)


def _swallowed(document: Document, context: Context) -> Iterator[Hit]:
    """HJSON takes a string without quotes to the end of its line."""
    for extension in document.extensions:
        text = document.text[extension.span.start : extension.span.end]
        if extension.kind == "unquoted-string" and any(mark in text for mark in (",", "}", "]", "#", "//")):
            what = f"without quotes the value is the rest of the line: {show(text)} (allowed: a string in quotes)"
            yield Hit((), what, f'"{text.split(",")[0].strip()}" in quotes', span=extension.span)


def _template(document: Document, context: Context) -> Iterator[Hit]:
    places = placeholders(document)
    if places:
        first = document.text[places[0].start : places[0].end]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        what = f"a template, with {first}{more} still to be filled in: nothing else is examined"
        yield Hit((), what, "values, or give what the template becomes to `ds-compress lint -`", span=places[0])


RULES = (
    Rule(
        "DSC001",
        "syntax-error",
        "error",
        _FAMILY,
        "The file is neither JSON nor HJSON.",
        "DeepSpeed reads the file with hjson (runtime/config.py) and stops at the first error; the linter names all.",
        '{"train_batch_size": 8, "fp16": {"enabled": false}\n',
        config(fp16={"enabled": False}),
        _errors,
        raises("HjsonDecodeError"),
    ),
    Rule(
        "DSC002",
        "duplicate-key",
        "error",
        _FAMILY,
        "A key stands twice in one object.",
        "DeepSpeed refuses duplicate keys (runtime/config_utils.py). Hugging Face takes the last one without a word, "
        "so that the same file may train differently there.",
        '{"train_batch_size": 8, "train_batch_size": 16}\n',
        config(),
        _duplicates,
        raises("Duplicate keys in DeepSpeed config"),
    ),
    Rule(
        "DSC003",
        "not-an-object",
        "error",
        _FAMILY,
        "The outermost value is not an object.",
        "deepspeed.initialize asks the configuration for keys at once (deepspeed/__init__.py).",
        "[8]\n",
        config(),
        _not_an_object,
        raises("AttributeError|TypeError"),
    ),
    Rule(
        "DSC004",
        "hjson-only-syntax",
        "warning",
        _FAMILY,
        "Syntax that DeepSpeed reads and Hugging Face does not.",
        "DeepSpeed reads HJSON: comments, trailing commas, keys without quotes. Transformers and Accelerate open the "
        "file with Python's json (accelerate/utils/deepspeed.py) and refuse these.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0},}\n',
        config(zero_optimization={"stage": 0}),
        _only_hjson,
        raises("JSONDecodeError|Expecting|Illegal|not a valid base64|neither"),
        {"framework": "accelerate"},
    ),
    Rule(
        "DSC005",
        "unquoted-string-takes-line",
        "warning",
        _FAMILY,
        "A string without quotes takes the comma behind it.",
        "In HJSON a string without quotes ends with its line; a comma or a comment behind it becomes part of it.",
        "{\n  train_batch_size: 8\n  wandb: {\n    enabled: false\n    group: first,\n    project: llm\n  }\n}\n",
        '{\n  train_batch_size: 8\n  wandb: {\n    enabled: false\n    group: "first",\n    project: llm\n  }\n}\n',
        _swallowed,
        accepts("the group would be named with the comma"),
    ),
    Rule(
        "DSC006",
        "template",
        "info",
        _FAMILY,
        "The file is a template.",
        "Values are still to be filled in: ZERO_STAGE, $STAGE, ${stage}, {{ stage }}, %(stage)d or <stage>. What is "
        "wrong with the configuration can be told when they are there.",
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {\n    "stage": ZERO_STAGE\n  }\n}\n',
        config(zero_optimization={"stage": 0}),
        _template,
        raises("ZERO_STAGE"),
    ),
)
