"""Finds and reads configurations: files, directories, standard input, base64."""

import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.lint.document import Document, parse
from deepspeed_compress.lint.hit import Hit, Span

STDIN = "-"
MAX_BYTES = 64 * 2**20
"""Larger files are not read."""

_YAML = (".yaml", ".yml")
_SUFFIXES = (".json", ".hjson", *_YAML)
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})
_NAMED = ("ds_config*", "ds_zero*", "*deepspeed*")
_KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "deepspeed_compress")
_TELLING = re.compile("|".join(_KEYS).encode())
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration that was read. `hints`: fields of Context that the file itself gives."""

    document: Document
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.document.path


def sources(arguments: Iterable[str], exclude: tuple[str, ...], stdin: BinaryIO) -> Iterator[Source]:
    """Every configuration that `arguments` mean, each file once; ConfigError for an argument that means nothing."""
    seen: set[str] = set()
    for argument in arguments:
        for source in _sources(argument, exclude, stdin):
            real = os.path.realpath(source.path)
            if argument == STDIN or real not in seen:
                seen.add(real)
                yield source


def _sources(argument: str, exclude: tuple[str, ...], stdin: BinaryIO) -> Iterator[Source]:
    if argument == STDIN:
        yield Source(_document(STDIN, stdin.read(MAX_BYTES + 1)))
    elif os.path.isdir(argument):
        for path in _walk(argument, exclude):
            yield from _read(path, in_directory=True)
    elif os.path.exists(argument):
        yield from _read(argument)
    elif decoded := decode_base64(argument):
        yield Source(replace(parse(decoded, "base64"), fixable=False))
    else:
        raise ConfigError(
            f"{argument[:200]}: no such file or directory, and not a base64-encoded configuration. Write the path of a "
            "DeepSpeed configuration, such as ds_config.json, of a directory, or - for standard input."
        )


def _walk(directory: str, exclude: tuple[str, ...]) -> Iterator[str]:
    """Files below `directory` that may be configurations, in the order of their names."""
    for parent, directories, files in os.walk(directory):
        directories[:] = sorted(name for name in directories if name[0] != "." and name not in _SKIPPED)
        for name in sorted(files):
            path = os.path.normpath(os.path.join(parent, name))
            if name.endswith(_SUFFIXES) and os.path.isfile(path) and not is_excluded(path, exclude):
                yield path


def is_excluded(path: str, exclude: tuple[str, ...]) -> bool:
    """Whether a pattern fits the path or its end."""
    posix = Path(path).as_posix()
    return any(fnmatch(posix, pattern) or fnmatch(posix, f"*/{pattern}") for pattern in exclude)


def is_config(document: Document) -> bool:
    """Whether a file of a directory is a DeepSpeed configuration, by its name or by keys that no other file has."""
    return _is_named(document.path) or any(document.has(key) for key in _KEYS)


def _is_named(path: str) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) for pattern in _NAMED)


def _read(path: str, in_directory: bool = False) -> Iterator[Source]:
    """The configuration in a file; of a directory only files that are one."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        yield Source(_unreadable(path, f"cannot be read ({error.strerror})", "a file that can"))
        return
    if path.endswith(_YAML):
        from deepspeed_compress.lint.accelerate import accelerate_sources

        yield from accelerate_sources(path, content, _read)
    elif not in_directory or _may_be_config(path, content):
        document = _document(path, content)
        if not in_directory or is_config(document):
            yield Source(document)


def _may_be_config(path: str, content: bytes) -> bool:
    """Whether it is worth reading: most JSON files of a directory are something else, and may be large."""
    return _is_named(path) or _TELLING.search(content) is not None


def _document(path: str, content: bytes) -> Document:
    if len(content) > MAX_BYTES:
        return _unreadable(path, f"larger than {MAX_BYTES >> 20} MiB", "a configuration of DeepSpeed")
    text = decode_text(content)
    if isinstance(text, Hit):
        return Document(path, "", None, (text,), fixable=False)
    decoded = decode_base64(text.strip())
    return replace(parse(decoded, path), fixable=False) if decoded else parse(text, path)


def decode_text(content: bytes) -> str | Hit:
    """The text of a file, or what is wrong with it. Line ends stay as they are."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return Hit((), f"not UTF-8 text (byte {error.start})", "the file in UTF-8", span=Span(0, 0))


def _unreadable(path: str, what: str, write: str) -> Document:
    return Document(path, "", None, (Hit((), what, write, span=Span(0, 0)),), fixable=False)


def decode_base64(text: str) -> str | None:
    """What `text` stands for, if it is base64 of something like a configuration."""
    if not _BASE64.fullmatch(text) or len(text) % 4:
        return None
    try:
        decoded = base64.b64decode(text, altchars=b"-_").decode("utf-8")
    except ValueError:
        return None
    return decoded if "{" in decoded or ":" in decoded else None
