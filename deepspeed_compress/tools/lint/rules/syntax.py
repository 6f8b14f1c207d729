"""Rules on syntax that cannot be read, or that only some programs can read."""

import re

from deepspeed_compress.diagnostics import Diagnostic, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import UNQUOTED, Document, Node
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.values import show


@rule("DSC001", "error")
def syntax_error(document: Document, context: Context) -> Findings:
    """The file is neither JSON nor HJSON.

    DeepSpeed reads the file with hjson (runtime/config.py) and stops at the first error. The linter reports all errors.

    Wrong:
        {"train_batch_size": 8, "fp16": {"enabled": false}
    Right: {"train_batch_size": 8, "fp16": {"enabled": false}}
    Proof: raises HjsonDecodeError
    """
    yield from document.problems


@rule("DSC003", "error")
def not_an_object(document: Document, context: Context) -> Findings:
    """The outermost value is not an object.

    deepspeed.initialize reads keys of the configuration at once (deepspeed/__init__.py).

    Wrong:
        [8]
    Right: {"train_batch_size": 8}
    Proof: raises AttributeError|TypeError
    """
    root = document.root
    if root is not None and root.kind != "object":
        what = f"the outermost value is {show(root.value)} (allowed: an object)"
        yield Diagnostic(at(span=root.span), what, write("the settings between braces"))


@rule("DSC002", "error")
def duplicate_key(document: Document, context: Context) -> Findings:
    """A key occurs twice in an object.

    DeepSpeed refuses duplicate keys (runtime/config_utils.py). Hugging Face silently uses the last one.

    Wrong:
        {"train_batch_size": 8, "train_batch_size": 16}
    Right: {"train_batch_size": 8}
    Proof: raises Duplicate keys in DeepSpeed config
    """
    if document.root is not None:
        yield from _duplicates_in(document, document.root, ())


def _duplicates_in(document: Document, node: Node, path: Path) -> Findings:
    first: dict[str, object] = {}
    for member in node.members:
        place = (*path, member.key)
        if member.key in first:
            # Only the user knows which of two different values was meant.
            removal = remove(document, place, member) if member.value.value == first[member.key] else ()
            what = f'key "{member.key}" occurs here for the second time (allowed: once)'
            correction = fix("Remove the second of two equal keys", removal)
            yield Diagnostic(at_key(*place, span=member.key_span), what, write("one of the two only"), fix=correction)
        first.setdefault(member.key, member.value.value)
        yield from _duplicates_in(document, member.value, place)
    for index, item in enumerate(node.items):
        yield from _duplicates_in(document, item, (*path, index))


@rule("DSC004", "error")
def hjson_only_syntax(document: Document, context: Context) -> Findings:
    """The file has syntax that DeepSpeed reads but Hugging Face and Lightning do not.

    DeepSpeed reads HJSON, which has comments, trailing commas and keys without quotes. Transformers, Accelerate and
    Lightning read the file with Python's json (accelerate/utils/deepspeed.py), which refuses these.

    Wrong:
        {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},}
    Right: {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    Context: {"framework": "accelerate"}
    Proof: raises JSONDecodeError|Expecting|Illegal|not a valid base64|neither
    """
    # One finding for each kind, at its first place, because such files have many.
    if not (context.hugging_face or context.framework == "lightning"):
        return
    reader = "Lightning" if context.framework == "lightning" else "Hugging Face"
    for kind in dict.fromkeys(extension.kind for extension in document.extensions):
        found = [extension for extension in document.extensions if extension.kind == kind]
        times = f", {len(found)} times," if len(found) > 1 else ""
        what = f"{kind}{times} is HJSON, which DeepSpeed reads and {reader} refuses (allowed: JSON)"
        yield Diagnostic(at(span=found[0].span), what, write("JSON"))


@rule("DSC005", "warning")
def unquoted_string_takes_line(document: Document, context: Context) -> Findings:
    """A string without quotes includes the comma after it.

    In HJSON, a string without quotes extends to the end of its line. A comma or a comment after it becomes part of it.

    Wrong:
        {
          train_batch_size: 8
          wandb: {
            enabled: false
            group: first,
            project: llm
          }
        }
    Right:
        {
          train_batch_size: 8
          wandb: {
            enabled: false
            group: "first",
            project: llm
          }
        }
    Proof: accepts the group would be named with the comma
    """
    for extension in document.extensions:
        text = document.text[extension.span.start : extension.span.end]
        if extension.kind == UNQUOTED and any(mark in text for mark in (",", "}", "]", "#", "//")):
            what = f"without quotes the value is the rest of the line: {show(text)} (allowed: a string in quotes)"
            word = _END_OF_VALUE.split(text, maxsplit=1)[0].strip()
            yield Diagnostic(at(span=extension.span), what, write(_LITERALS.get(word, f'"{word}" in quotes')))


_END_OF_VALUE = re.compile(r"[,}\]#;]|//")
_LITERALS = {
    "True": "true",
    "False": "false",
    "None": "null",
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "a finite number"),
}
"""Literals of Python and JavaScript, with what to write instead."""
