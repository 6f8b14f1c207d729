"""Streams documents out of text files in pieces, so that a file may be larger than memory."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deepspeed_compress.errors import DataError

CHUNK_CHARS = 1 << 20

Document = Iterator[str]
"""The text of one document, in pieces which join to the whole."""


def documents(file: Path, chunk_chars: int = CHUNK_CHARS) -> Iterator[Document]:
    """Documents of one file: the whole of a .txt file, the "text" of each line of a .jsonl file.

    Each document must be read to its end before the next one is asked for. Raises DataError when the file
    cannot be read, is not UTF-8, or has a line without "text".
    """
    with _readable(file), file.open(encoding="utf-8") as stream:
        yield from READERS[file.suffix](stream, chunk_chars)


def split_at_words(pieces: Iterable[str], limit: int) -> Iterator[str]:
    """The same text, cut only where white space follows something else.

    No byte-level BPE token of the GPT-2 pattern spans such a place, so encoding the pieces one by one gives
    the tokens of the whole. A run of more than `limit` characters without such a place is cut anyway.
    """
    held = ""
    for piece in pieces:
        held += piece
        cut = _last_word_end(held)
        if cut == 0 and len(held) > limit:
            cut = len(held)
        if cut:
            yield held[:cut]
        held = held[cut:]
    if held:
        yield held


def _last_word_end(text: str) -> int:
    """Largest i > 0 where text[i] is white space and text[i - 1] is not; 0 when there is none."""
    places = range(len(text) - 1, 0, -1)
    return next((i for i in places if text[i].isspace() and not text[i - 1].isspace()), 0)


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
    # Read while the document is consumed, which is outside of the frame of documents().
    with _readable(Path(stream.name)):
        while chunk := stream.read(chunk_chars):
            yield chunk


def _json_lines(stream: TextIO, _chunk_chars: int) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield iter([_text_of_line(line, f"{stream.name}:{number}")])


def _text_of_line(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'{place}: expected a JSON object with a string "text", found {line[:60]!r}')
    return text


READERS: dict[str, Callable[[TextIO, int], Iterator[Document]]] = {".txt": _plain_text, ".jsonl": _json_lines}
SUFFIXES = tuple(READERS)
