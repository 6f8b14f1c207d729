"""Texts of the package's warnings and errors."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_compress.errors import CompressWarning


@contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Yield a list to which the package's warnings within the block are added. Other warnings are dropped."""
    texts: list[str] = []

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, CompressWarning):
            texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield texts


def check_contained(parts: Iterable[str], texts: Iterable[str]) -> None:
    """Check that each of `texts` contains the one of `parts` at the same position."""
    assert [(part, text) for part, text in zip(parts, texts, strict=True) if part not in text] == []


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], work: Callable[..., object], *args: Any, **options: Any
) -> str:
    """Return the message of the error of `kind` that `work(*args, **options)` raises, or "" if it raises none."""
    try:
        work(*args, **options)
    except kind as error:
        return str(error)
    return ""
