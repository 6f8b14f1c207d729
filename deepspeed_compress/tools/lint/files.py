"""Finding and reading configurations: files, directories, standard input, base64, and tests of files not yet read."""

import base64
import codecs
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import PurePath
from typing import BinaryIO

from deepspeed_compress.diagnostics import Diagnostic, Span, at, write
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import check_regular
from deepspeed_compress.tools.lint.accelerate import embedded, is_used, named_file
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import OWN_FILE, file_matches

STDIN = "-"
MAX_BYTES = 64 * 2**20
"""Maximum number of bytes of a file. Larger files are not read."""

YAML = (".yaml", ".yml")
_SUFFIXES = (".json", ".hjson", *YAML)
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})
_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
_NAMED = ("ds_config*", "ds_zero*")
_PERHAPS = ("*deepspeed*", "ds[_-]*", "*zero*", "*stage*")
_OWN = ("zero_optimization", "train_micro_batch_size_per_gpu", "deepspeed_compress")
"""Keys that occur only in DeepSpeed configurations."""
_OF_ACCELERATE = "deepspeed_config"
_MARKED = re.compile("|".join(_OWN).encode())
_MARKED_YAML = re.compile(rf"^[\"']?({'|'.join((*_OWN, _OF_ACCELERATE))})[\"']?[ \t]*:".encode(), re.MULTILINE)
_FILLED = frozenset(
    {
        "bf16",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
    }
)
"""Keys in which Hugging Face fills in "auto"."""


@dataclass(frozen=True, slots=True)
class Source:
    """Configuration that was read, and what it shows about the run."""

    document: Document
    framework: Framework | None = None
    world_size: int | None = None
    from_stdin: bool = False
    unread: str = ""
    """File that this configuration names and that was not read, because it is outside the project."""

    @property
    def path(self) -> str:
        return self.document.path


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of a search: which files are skipped, and the name of standard input."""

    exclude: tuple[str, ...] = ()
    force: bool = False
    """True if files named by arguments are also skipped when they are excluded or are not configurations."""
    stdin_name: str = STDIN
    follow_outside: bool = False
    """True to read files outside the project that only a configuration or a link refers to."""


def sources(arguments: Iterable[str], search: Search, stdin: BinaryIO) -> Iterator[Source]:
    """Yield every configuration that `arguments` refer to, each file once.

    Raises:
        ConfigError: An argument refers to nothing.
    """
    seen: set[str] = set()
    for argument in arguments:
        for source in _sources(argument, search, stdin):
            real = os.path.realpath(source.path)
            if source.from_stdin or real not in seen:
                seen.add(real)
                yield source


def _sources(argument: str, search: Search, stdin: BinaryIO) -> Iterator[Source]:
    if argument == STDIN:
        for source in _parsed(search.stdin_name, stdin.read(MAX_BYTES + 1), search):
            yield replace(source, from_stdin=source.path == search.stdin_name)
    elif os.path.isdir(argument):
        # Links come last, so that a file found under its own name too is corrected under that name.
        for path in sorted(_walk(argument, search.exclude), key=os.path.islink):
            yield from _found(path, search)
    elif os.path.exists(argument):
        check_regular(argument)
        if not (search.force and is_excluded(argument, search.exclude)):
            yield from _read(argument, search, found=search.force)
    elif decoded := decode_base64(argument):
        yield Source(replace(parse(decoded, "base64"), fixable=False))
    else:
        raise ConfigError(
            f"{argument[:200]}: no such file or directory, and not a base64-encoded configuration. Write the path of a "
            "DeepSpeed configuration, such as ds_config.json, of a directory, or - for standard input."
        )


def _walk(directory: str, exclude: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below `directory` that may be configurations, in the order of their names."""
    for parent, directories, files in os.walk(directory):
        directories[:] = sorted(
            name
            for name in directories
            if name[0] != "." and name not in _SKIPPED and not is_excluded(os.path.join(parent, name), exclude)
        )
        for name in sorted(files):
            path = os.path.normpath(os.path.join(parent, name))
            if name.endswith(_SUFFIXES) and os.path.isfile(path) and not is_excluded(path, exclude):
                yield path


def is_excluded(path: str, exclude: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the path, its end, or an enclosing directory below the working directory."""
    relative = PurePath(os.path.relpath(path))
    above = () if ".." in relative.parts else relative.parents
    return any(file_matches(str(part), pattern.rstrip("/")) for part in (path, *above) for pattern in exclude)


def _found(path: str, search: Search) -> Iterator[Source]:
    """Yield the configuration in a file that no argument names. A file behind a link is never written."""
    if not os.path.islink(path):
        yield from _read(path, search, found=True)
    elif search.follow_outside or is_inside(path, os.path.dirname(path)):
        for source in _read(path, search, found=True):
            yield replace(source, document=replace(source.document, fixable=False))
    elif may_be_config(path, b""):
        yield Source(_unreadable(path, "a link to a file outside of the project, which is not read", _FOLLOW))


_FOLLOW = "--follow-outside to read it, or name the link itself"
_PROJECT_MARKS = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg", OWN_FILE)


def project_of(directory: str) -> str:
    """Return the project that a directory belongs to.

    This is the nearest enclosing directory that holds a repository or project settings. Otherwise, it is the working
    directory if that encloses the directory, or else the directory itself.
    """
    here = os.path.realpath(directory or ".")
    around = (here, *map(str, PurePath(here).parents))
    marked = (each for each in around if any(os.path.exists(os.path.join(each, mark)) for mark in _PROJECT_MARKS))
    current = os.path.realpath(".")
    return next(marked, current if current in around else here)


def is_inside(path: str, directory: str) -> bool:
    """Return True if a file, with all links resolved, is inside the project of `directory`."""
    project = project_of(directory)
    return os.path.commonpath((project, os.path.realpath(path))) == project


def _read(path: str, search: Search, found: bool = False) -> Iterator[Source]:
    """Yield the configuration in a file. If it was `found` in a directory, yield it only if it is a configuration."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        yield Source(_unreadable(path, f"cannot be read ({error.strerror})", "a file that can"))
        return
    yield from _parsed(path, content, search, found)


def _parsed(path: str, content: bytes, search: Search, found: bool = False) -> Iterator[Source]:
    if path.endswith(YAML):
        yield from _of_yaml(path, content, search)
    elif not found or may_be_config(path, content):
        document = _document(path, content)
        if not found or is_config(document):
            yield Source(document)


def _of_yaml(path: str, content: bytes, search: Search) -> Iterator[Source]:
    """Yield the configuration in a YAML file, which is Accelerate's or DeepSpeed's own. Most YAML files are neither."""
    if not may_be_config(path, content, yaml=True):
        return
    document = _document(path, content)
    if document.problems:
        yield from [Source(document)] if is_meant(path, content, yaml=True) else []
    elif document.has("deepspeed_config"):
        yield from _named_or_embedded(document, search)
    elif is_config(document):
        yield Source(document)


def _named_or_embedded(document: Document, search: Search) -> Iterator[Source]:
    """Yield the DeepSpeed configuration in one of Accelerate, and the file it names if Accelerate reads that file."""
    if not is_used(document) and not document.get("deepspeed_config"):
        return  # `accelerate config` writes an empty section for every choice
    ranks = document.get("num_processes")
    world_size = ranks if isinstance(ranks, int) and ranks > 0 else None
    file = named_file(document) if is_used(document) else None
    outside = file is not None and not (search.follow_outside or is_inside(file, os.path.dirname(document.path)))
    yield Source(embedded(document), "accelerate", world_size, unread=file if file is not None and outside else "")
    # Accelerate reads the file as JSON, whatever its name.
    for source in () if file is None or outside else _named(file):
        yield Source(source.document, "accelerate", world_size)


def _named(path: str) -> Iterator[Source]:
    """Yield the file that Accelerate reads as JSON. If it is YAML, a rule reports that where it is named."""
    if not path.endswith(YAML):
        for source in _read(path, Search()):
            fixable = source.document.fixable and not os.path.islink(path)
            yield replace(source, document=replace(source.document, fixable=fixable))


def _document(path: str, content: bytes) -> Document:
    if len(content) > MAX_BYTES:
        return _unreadable(path, f"larger than {MAX_BYTES >> 20} MiB", "a configuration of DeepSpeed")
    text = decode_text(content)
    if isinstance(text, Diagnostic):
        # Each invalid byte is replaced by a character, so that the line of the error can be reported.
        return Document(path, content.decode("utf-8", "replace"), None, (text,), fixable=False)
    if path.endswith(YAML):
        from deepspeed_compress.tools.lint.yaml_reader import parse_yaml

        return parse_yaml(text, path)
    decoded = decode_base64(text.strip())
    return replace(parse(decoded, path), fixable=False) if decoded else parse(text, path)


def decode_text(content: bytes) -> str | Diagnostic:
    """Return the text of a file, or a diagnostic if it is not UTF-8. Line ends are not changed."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        start = len(content[: error.start].decode("utf-8"))
        wide = next((f", but {name} by its byte order mark" for mark, name in _MARKS if content.startswith(mark)), "")
        what = f"not UTF-8 text (byte {error.start}){wide}"
        return Diagnostic(at(span=Span(start, start + 1)), what, write("the file in UTF-8"))


def _unreadable(path: str, message: str, instead: str) -> Document:
    problem = Diagnostic(at(span=Span(0, 0)), message, write(instead))
    return Document(path, "", None, (problem,), fixable=False)


def decode_base64(text: str) -> str | None:
    """Return the decoded text if `text` is base64 of something like a configuration, else None."""
    if not _BASE64.fullmatch(text) or len(text) % 4:
        return None
    try:
        decoded = base64.b64decode(text, altchars=b"-_").decode("utf-8")
    except ValueError:
        return None
    return decoded if "{" in decoded or ":" in decoded else None


def is_meant(path: str, content: bytes, yaml: bool = False) -> bool:
    """Return True if a file is clearly meant to be a configuration, so that even a syntax error should be reported."""
    return _fits(path, _NAMED) or (_MARKED_YAML if yaml else _MARKED).search(content) is not None


def may_be_config(path: str, content: bytes, yaml: bool = False) -> bool:
    """Return True if a file should be read. Most files in a directory are something else and may be large."""
    return _fits(path, _PERHAPS) or is_meant(path, content, yaml)


def is_config(document: Document) -> bool:
    """Return True if the document is a configuration.

    This is decided by its name, by a key that only configurations have, or by a likely name together with DeepSpeed's
    keys making up at least half of its keys.
    """
    if _fits(document.path, _NAMED) or any(document.has(key) for key in _OWN):
        return True
    known = sum(key in keys().sections[()].keys for key in document.data)
    return _fits(document.path, _PERHAPS) and 0 < len(document.data) <= 2 * known


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) for pattern in patterns)


def detected_framework(document: Document) -> Framework | None:
    """Return `hf` if there is an "auto" that neither DeepSpeed nor its autotuner fills in, else None."""
    if document.get("autotuning", "enabled") is True:
        return None
    autos = (path for path, member in document.walk() if member.value.value == "auto")
    return "hf" if any(path[0] in _FILLED and "zenflow" not in path for path in autos) else None
