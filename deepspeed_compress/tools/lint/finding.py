"""A hit of a rule, with its place in a file: what is reported."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Hit, Span
from deepspeed_compress.tools.lint.rule import Rule


def pointer(path: Iterable[str | int]) -> str:
    """JSON pointer (RFC 6901); as `config.problems.pointer`, which would load pydantic."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a file."""

    rule: Rule
    hit: Hit
    document: Document

    @cached_property
    def span(self) -> Span:
        return self.document.span_of(self.hit)

    @cached_property
    def start(self) -> tuple[int, int]:
        """Line and column of the first character, from 1."""
        return self.document.position(self.span.start)

    @cached_property
    def end(self) -> tuple[int, int]:
        """Line and column behind the last character, from 1."""
        return self.document.position(self.span.end)

    @property
    def pointer(self) -> str:
        """Where it is in the configuration; empty for syntax errors and for what is missing at the top."""
        return pointer(self.hit.path)

    @property
    def message(self) -> str:
        """What is wrong, and where in the configuration."""
        return f"{self.hit.what} (at {self.pointer})" if self.hit.path else self.hit.what

    @property
    def advice(self) -> str:
        """What to write instead, as a sentence."""
        return f"Write {self.hit.write}."

    @property
    def fixable(self) -> str:
        """The option that corrects it; empty when none does."""
        if self.hit.fix is None or not self.document.fixable:
            return ""
        return "--fix" if self.hit.fix.safe else "--fix --unsafe-fixes"
