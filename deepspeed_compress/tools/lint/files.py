"""Finding and reading configurations: files, directories, standard input, and tests of files not yet read."""

import codecs
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePath

from deepspeed_compress.diagnostics import Span
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import check_regular
from deepspeed_compress.tools.lint.document import Document, unread
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.lint.rules.accelerate import SECTION, YAML, file_name, find_file, is_used
from deepspeed_compress.tools.lint.rules.auto import BY_TRAINER
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.values import AUTO

STDIN = "-"
MAX_BYTES = 64 * 2**20
"""Maximum number of bytes of a file. Larger files are not read."""

_SUFFIXES = (".json", ".hjson", *YAML)
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})
_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))
_NAMES = ("ds_config*", "ds_zero*", "deepspeed_config*")
_KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "deepspeed_compress")
"""Keys that occur only in DeepSpeed configurations."""
_MARKED = re.compile("|".join(_KEYS).encode())
_MARKED_YAML = re.compile(rf"^[\"']?({'|'.join((*_KEYS, SECTION))})[\"']?[ \t]*:".encode(), re.MULTILINE)

_NAMING = ("deepspeed", "accelerate_config")
"""Keys of LLaMA-Factory, ms-swift, axolotl and TRL that name a configuration of DeepSpeed or Accelerate."""
_MARKED_NAMING = re.compile(rf"^({'|'.join(_NAMING)})[ \t]*:".encode(), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """Configuration that was read, and what it shows about the run."""

    document: Document
    framework: Framework | None = None
    world_size: int | None = None

    @property
    def path(self) -> str:
        return self.document.path


def sources(arguments: Iterable[str], exclude: Iterable[str] = ()) -> Iterator[Source]:
    """Yield every configuration that `arguments` refer to, each file once.

    Args:
        arguments: Files, directories, or - for standard input.
        exclude: Patterns of files and directories that are not searched.

    Raises:
        ConfigError: An argument refers to nothing.
    """
    seen: set[str] = set()
    for argument in arguments:
        for source in _sources(argument, tuple(exclude)):
            real = os.path.realpath(source.path)
            if real not in seen:
                seen.add(real)
                yield source


def _sources(argument: str, exclude: tuple[str, ...]) -> Iterator[Source]:
    if argument == STDIN:
        yield Source(_document(STDIN, sys.stdin.buffer.read(MAX_BYTES + 1)))
    elif os.path.isdir(argument):
        for path in _walk(argument, exclude):
            yield from _read(path, found=True)
    elif not os.path.exists(argument):
        raise ConfigError(
            f"{argument[:200]}: no such file or directory. Write the path of one, or - for standard input."
        )
    else:
        check_regular(argument)
        yield from _read(argument)


def _walk(directory: str, exclude: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below `directory` that may be configurations, in the order of their names. Skip links."""
    for parent, directories, files in os.walk(directory):
        directories[:] = sorted(
            name
            for name in directories
            if name[0] != "." and name not in _SKIPPED and not is_excluded(os.path.join(parent, name), exclude)
        )
        for name in sorted(files):
            path = os.path.normpath(os.path.join(parent, name))
            is_file = os.path.isfile(path) and not os.path.islink(path)
            if name.endswith(_SUFFIXES) and is_file and not is_excluded(path, exclude):
                yield path


def is_excluded(path: str, exclude: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the path, its end, or an enclosing directory below the working directory."""
    relative = PurePath(os.path.relpath(path))
    above = () if ".." in relative.parts else relative.parents
    return any(file_matches(str(part), pattern.rstrip("/")) for part in (path, *above) for pattern in exclude)


def file_matches(path: str, pattern: str) -> bool:
    """Return True if `pattern` matches the name of a file or the end of its path."""
    pure = PurePath(path)
    return fnmatch(pure.name, pattern) or fnmatch(pure.as_posix(), pattern) or fnmatch(pure.as_posix(), f"*/{pattern}")


def _read(path: str, found: bool = False, follow: bool = True) -> Iterator[Source]:
    """Yield the configuration in a file. If it was `found` in a directory, yield it only if it is a configuration.

    With `follow`, a fine-tuning framework's file yields the configurations that it names.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        yield Source(unread(path, "", Span(0, 0), f"cannot be read ({error.strerror})", "a file that can"))
        return
    if path.endswith(YAML):
        yield from _of_yaml(path, content, follow)
    elif not found or _is_meant(path, _MARKED, content):
        document = _document(path, content)
        if not found or is_config(document):
            yield Source(document)


def _of_yaml(path: str, content: bytes, follow: bool) -> Iterator[Source]:
    """Yield the configuration in a YAML file, which is Accelerate's or DeepSpeed's, and those that it names.

    Most YAML files do neither.
    """
    if not _is_meant(path, _MARKED_YAML, content):
        if follow and _MARKED_NAMING.search(content):
            settings = _document(path, content)
            for source in (source for key in _NAMING for source in _named(settings, settings.get(key))):
                # A fine-tuning framework trains with Trainer.
                yield replace(source, framework=source.framework or "hf")
        return
    document = _document(path, content)
    if document.has(SECTION):
        yield from _of_accelerate(document)
    elif document.problems or is_config(document):
        yield Source(document)


def _of_accelerate(document: Document) -> Iterator[Source]:
    """Yield a configuration of Accelerate, unless its section is empty and unused, and the one that it names."""
    ranks = document.get("num_processes")
    world_size = ranks if isinstance(ranks, int) and ranks > 0 else None
    if is_used(document) or document.get(SECTION):
        yield Source(document, "accelerate", world_size)
    name = file_name(document)
    # Accelerate reads the file as JSON, whatever its name. If it is YAML, a rule reports that where it is named.
    for source in _named(document, None if name is None or name.endswith(YAML) else name):
        yield replace(source, framework="accelerate", world_size=world_size)


def _named(document: Document, name: object) -> Iterator[Source]:
    """Yield the configurations in the file `name`, if `document` names one that exists."""
    file = find_file(document, name) if isinstance(name, str) else None
    for source in () if file is None else _read(file, follow=False):
        # Only `document` names this file. One that came from elsewhere must not change other files.
        real, above = Path(source.path).resolve(), (Path(), Path(document.path).parent)
        near = any(real.is_relative_to(directory.resolve()) for directory in above)
        yield replace(source, document=replace(source.document, fixable=source.document.fixable and near))


def _document(path: str, content: bytes) -> Document:
    if len(content) > MAX_BYTES:
        return unread(path, "", Span(0, 0), f"larger than {MAX_BYTES >> 20} MiB", "a configuration of DeepSpeed")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        # Each invalid byte is replaced by a character, so that the line of the error can be reported.
        shown, start = content.decode("utf-8", "replace"), len(content[: error.start].decode("utf-8"))
        wide = next((f", but {name} by its byte order mark" for mark, name in _MARKS if content.startswith(mark)), "")
        what = f"not UTF-8 text (byte {error.start}){wide}"
        return unread(path, shown, Span(start, start + 1), what, "the file in UTF-8")
    if path.endswith(YAML):
        from deepspeed_compress.tools.lint.yaml_reader import parse_yaml

        return parse_yaml(text, path)
    return parse(text, path)


def _is_meant(path: str, mark: re.Pattern[bytes], content: bytes) -> bool:
    """Return True if a file is probably a configuration. Most files in a directory are something else, and some large.

    Even a syntax error in such a file is reported.
    """
    return _fits(path) or mark.search(content) is not None


def is_config(document: Document) -> bool:
    """Return True if the document is a configuration, by its name or by a key that only configurations have."""
    return _fits(document.path) or any(document.has(key) for key in _KEYS)


def _fits(path: str) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) for pattern in _NAMES)


def detected_framework(document: Document) -> Framework | None:
    """Return `hf` if there is an "auto" that Hugging Face fills in, but not DeepSpeed's autotuner, else None."""
    if document.get("autotuning", "enabled") is True:
        return None
    return "hf" if any(document.get(*path) == AUTO for path in BY_TRAINER) else None
