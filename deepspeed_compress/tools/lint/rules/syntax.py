"""Syntax: what cannot be read, or is read by one program and not by the other."""

from collections.abc import Iterator, Sequence

from deepspeed_compress.tools.lint.document import Document, Extension, Node
from deepspeed_compress.tools.lint.edits import fix, remove
from deepspeed_compress.tools.lint.hit import Fix, Hit, Path
from deepspeed_compress.tools.lint.placeholders import TEMPLATE, placeholders, shown
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import config, hugging_face, show

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
    """One finding for each kind of syntax, at the first place of it."""
    if not hugging_face(context):
        return
    for kind in dict.fromkeys(extension.kind for extension in document.extensions):
        found = [extension for extension in document.extensions if extension.kind == kind]
        words = _NAMES.get(kind, f"a {kind.replace('-', ' ')}".replace("a un", "an un"))
        words += f", {len(found)} times," if len(found) > 1 else ""
        what = f"{words} is HJSON, which DeepSpeed reads and Hugging Face refuses (allowed: JSON)"
        yield Hit((), what, "JSON", fix=_as_json(found), span=found[0].span)


def _as_json(extensions: Sequence[Extension]) -> Fix | None:
    """All that can be said in JSON without losing anything."""
    fixes = [extension.fix for extension in extensions if extension.fix is not None]
    return fix(fixes[0].title, *(one.edits for one in fixes)) if fixes else None


def _swallowed(document: Document, context: Context) -> Iterator[Hit]:
    """HJSON takes a string without quotes to the end of its line."""
    for extension in document.extensions:
        text = document.text[extension.span.start : extension.span.end]
        if extension.kind == "unquoted-string" and any(mark in text for mark in (",", "}", "]", "#", "//")):
            what = f"without quotes the value is the rest of the line: {show(text)} (allowed: a string in quotes)"
            yield Hit((), what, f'"{text.split(",")[0].strip()}" in quotes', span=extension.span)


def _template(document: Document, context: Context) -> Iterator[Hit]:
    found = placeholders(document)
    if found:
        first = shown(document, found[0])
        many = f"{first} and {len(found) - 1} more stand" if len(found) > 1 else f"{first} stands"
        what = f"{many} for a value that a script puts in: what depends on it is not examined"
        yield Hit((), what, "values, or lint the file that the script makes", span=found[0])


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
        "error",
        _FAMILY,
        "Syntax that DeepSpeed reads and Hugging Face does not.",
        "DeepSpeed reads HJSON: comments, trailing commas, keys without quotes. Transformers and Accelerate open the "
        "file with Python's json (accelerate/utils/deepspeed.py) and refuse these.",
        '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},}\n',
        config(gradient_clipping=1.0, zero_optimization={"stage": 0}),
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
        TEMPLATE,
        "template",
        "info",
        _FAMILY,
        "A template, into which a script puts values.",
        "Names such as ZERO_STAGE, ${stage} and {{ stage }} stand for values. One finding for a file: what is made of "
        "it can be examined.",
        '{"train_batch_size": 8, "zero_optimization": {"stage": "ZERO_STAGE"}}\n',
        config(zero_optimization={"stage": 0}),
        _template,
        raises("Input should be"),
    ),
)
