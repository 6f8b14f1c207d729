"""Valid and broken HJSON, and toy rules, for tests of the linter."""

from collections.abc import Iterator

from hypothesis import strategies as st

from deepspeed_compress.diagnostics import Diagnostic, Path, Severity, at, at_key, write
from deepspeed_compress.tools.lint.document import Document, Member, Node
from deepspeed_compress.tools.lint.fixes import fix, remove, replace
from deepspeed_compress.tools.lint.rule import Check, Context, LintRule, Proof

PIECES = (
    *"{}[],:\"'#\\ \n\t-+_ab019é\u00a0\x0b\x00",
    *("'''", "\r\n", "//", "/*", "*/", "null", "true", "false", "1.5", "1e3", "1e400", '"a": ', "a: ", '"x"', "'y'"),
    *('\\"', "\\u00e9", "\\ud83d\\ude00", "\\u12", "\\n", "\\'", "\ufeff"),
)
SCALARS = ("1", "-0.0", "2e3", "5e-1", "true", "null", '"s"', "'q'", "word\n", "false /*c*/", '"a\\tb"', "1 //c\n")


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return objects with all kinds of keys and separators."""
    key = st.sampled_from(('"a"', "b", "'e'", '"\\u0041"', "f-g"))
    pair = st.builds("{}{}{}".format, key, st.sampled_from((":", " : ")), values)
    return _joined(pair, "{", "}")


def arrays(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return arrays with all kinds of separators."""
    return _joined(values, "[", "]")


def _joined(items: st.SearchStrategy[str], opener: str, closer: str) -> st.SearchStrategy[str]:
    separator, end = st.sampled_from((", ", " ", "\n", ",\n")), st.sampled_from(("", ",", "\n", " #c\n"))

    def join(found: list[str], between: str, last: str) -> str:
        return opener + between.join(found) + last + closer

    return st.builds(join, st.lists(items, max_size=4), separator, end)


CONFIGS = objects(st.recursive(st.sampled_from(SCALARS), lambda inner: objects(inner) | arrays(inner), max_leaves=12))
"""Mostly valid HJSON."""


@st.composite
def broken(draw: st.DrawFn) -> str:
    """Return a configuration with a piece inserted or replaced."""
    text: str = draw(CONFIGS)
    at = draw(st.integers(0, len(text)))
    piece: str = draw(st.sampled_from(PIECES))
    return text[:at] + piece + text[at + draw(st.integers(0, 2)) :]


NOISE = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


def walk(node: Node | None, path: Path = ()) -> Iterator[tuple[Path, Member]]:
    """Yield every key of every object with its path, including duplicates, in the order of the text."""
    for member in () if node is None else node.members:
        yield (*path, member.key), member
        yield from walk(member.value, (*path, member.key))
    for index, item in enumerate(() if node is None else node.items):
        yield from walk(item, (*path, index))


def rule(code: str, name: str, check: Check, severity: Severity = "error") -> LintRule:
    """Return a rule whose texts do not matter."""
    return LintRule(
        code=code,
        name=name,
        severity=severity,
        family="toys",
        summary="Summary.",
        reason="Reason.",
        wrong="{}",
        right="{}",
        proof=Proof("raises", "x"),
        check=check,
    )


def _syntax(document: Document, context: Context) -> Iterator[Diagnostic]:
    yield from document.problems


def _strict(document: Document, context: Context) -> Iterator[Diagnostic]:
    for extension in document.extensions:
        yield Diagnostic(at(span=extension.span), f"{extension.kind} is not JSON", write("JSON"))


def _stage(document: Document, context: Context) -> Iterator[Diagnostic]:
    stage = document.get("zero_optimization", "stage")
    if isinstance(stage, int) and stage > 3:
        path = ("zero_optimization", "stage")
        better = fix("Use 3", replace(document, path, 3))
        yield Diagnostic(at(*path), f"{stage} is no stage (allowed: 0 to 3)", write('"stage": 3'), fix=better)


def _removed(document: Document, context: Context) -> Iterator[Diagnostic]:
    if document.has("amp"):
        removal = fix("Remove amp", remove(document, ("amp",)))
        yield Diagnostic(at_key("amp"), "amp was removed", write("nothing: remove the key"), fix=removal)


def _batch(document: Document, context: Context) -> Iterator[Diagnostic]:
    if context.world_size and not document.has("train_batch_size"):
        message = f"no batch size for {context.world_size} ranks"
        yield Diagnostic(at("train_batch_size"), message, write('"train_batch_size": 8'))


SYNTAX = rule("DSC001", "syntax-error", _syntax)
STRICT = rule("DSC002", "hjson", _strict, "info")
REMOVED = rule("DSC101", "removed-amp", _removed, "warning")
BATCH = rule("DSC201", "batch-missing", _batch)
STAGE = rule("DSC401", "stage-range", _stage)
TOYS = (SYNTAX, REMOVED, BATCH, STAGE)
