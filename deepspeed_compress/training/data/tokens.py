"""Token cache: a corpus that is encoded once and read through a memory map, and the selection of each step's tokens.

`<directory>/<key>.bin` holds the tokens of all files one after another, as little-endian uint16 or uint32.
`<key>.json` has the start of each file. The key is a digest of the texts and the tokenizer, so a cache never serves
other data. Both files are written under temporary names and renamed, the .json last: if it exists, the cache is
complete.

There is no iterator state: (seed, n) determine what step n reads. So a resumed run continues exactly, and the batch of
a step is the same with any number of data-parallel ranks.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepspeed_compress.errors import DataError
from deepspeed_compress.safe_files import replacing
from deepspeed_compress.training.data.corpus import CHUNK_CHARS, documents
from deepspeed_compress.training.data.tokenizer import end_token, load_tokenizer

FORMAT = 1
Progress = Callable[[str, int, int], None]
"""Function called as progress(what, done, total), in bytes of text. During encoding, characters count as bytes."""


@dataclass(frozen=True)
class TokenCache:
    """Encoded corpus: `tokens` (n,) is a read-only memory map, and file i is tokens[bounds[i]:bounds[i + 1]]."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    bounds: tuple[int, ...]
    vocab_size: int


def cache_key(files: list[Path], tokenizer: Path, progress: Progress | None = None) -> str:
    """Return 32 hexadecimal digits from the content of `files` in order and of the tokenizer.

    Raises:
        DataError: if a file cannot be read.
    """
    total, done = _size(files), 0
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    for file in [tokenizer / "tokenizer.json", *files]:
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
        if progress and file in files:
            done += file.stat().st_size
            progress("reading", done, total)
    return digest.hexdigest()[:32]


def build_cache(
    files: list[Path],
    tokenizer: Path,
    directory: Path,
    key: str,
    progress: Progress | None = None,
    chunk_chars: int = CHUNK_CHARS,
) -> None:
    """Encode `files` into `directory` under `key`, unless that cache exists.

    Several processes may do this at once: the last rename wins, and all contents are the same. Memory use does not
    grow with the corpus.

    Raises:
        DataError: if a file cannot be read or nothing can be written.
    """
    if _index_file(directory, key).is_file():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _encode_all(files, tokenizer, directory, key, progress, chunk_chars)
    except OSError as error:
        raise DataError(f"token cache {directory}: cannot be written: {error.strerror or error}") from None


def open_cache(directory: Path, key: str) -> TokenCache:
    """Map a cache that `build_cache` made. Raises DataError if it is missing or damaged."""
    try:
        index = json.loads(_index_file(directory, key).read_text(encoding="utf-8"))
        tokens = np.memmap(_token_file(directory, key), dtype=index["dtype"], mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"token cache {_token_file(directory, key)}: missing or damaged ({error}); delete it to build it again"
        ) from None
    if tokens.size != index["bounds"][-1]:
        raise DataError(f"token cache {_token_file(directory, key)}: truncated; delete it to build it again")
    return TokenCache(tokens, tuple(index["bounds"]), index["vocab_size"])


def _encode_all(
    files: list[Path], tokenizer: Path, directory: Path, key: str, progress: Progress | None, chunk_chars: int
) -> None:
    loaded = load_tokenizer(tokenizer)
    vocab_size, end = loaded.get_vocab_size(), end_token(tokenizer, loaded)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    bounds, done, total = [0], 0, _size(files)
    with _replacing(_token_file(directory, key)) as stream:
        for file in files:
            bounds.append(bounds[-1])
            for tokens, chars in _encoded(file, loaded, end, chunk_chars):
                stream.write(np.asarray(tokens, dtype=dtype).tobytes())
                bounds[-1] += len(tokens)
                done += chars
                if progress:
                    progress("encoding", done, total)
    with _replacing(_index_file(directory, key)) as stream:
        index = {"format": FORMAT, "dtype": dtype.str, "vocab_size": vocab_size, "bounds": bounds}
        stream.write(json.dumps(index | {"files": [str(file) for file in files]}).encode())


def _encoded(file: Path, tokenizer: Tokenizer, end: int, chunk_chars: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of each part of the text, and the number of characters that they encode."""
    for document in documents(file, chunk_chars):
        for piece in document:
            yield tokenizer.encode(piece, add_special_tokens=False).ids, len(piece)
        yield [end], 0


def _replacing(target: Path) -> AbstractContextManager[BinaryIO]:
    """Return a context that replaces `target` by a new file. Ranks of several hosts may write the same one."""
    return replacing(target, target.with_name(f".{target.name}-{secrets.token_hex(8)}"))


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _token_file(directory: Path, key: str) -> Path:
    return directory / f"{key}.bin"


def _index_file(directory: Path, key: str) -> Path:
    return directory / f"{key}.json"


Segment = tuple[int, int]
"""Start and end of a range of tokens that a window must not leave."""


@dataclass(frozen=True)
class Windows:
    """Ranges of a token cache from which windows of `length` tokens are read."""

    cache: TokenCache
    segments: tuple[Segment, ...]
    length: int

    def read(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the windows that begin at `starts` (n,), as (n, length) int64."""
        return np.asarray(self.cache.tokens[starts[:, None] + np.arange(self.length)], dtype=np.int64)


def split_windows(cache: TokenCache, length: int, held_out: float) -> tuple[Windows, Windows]:
    """Return (train, held out) windows. The last fraction `held_out` of each file is held out.

    Raises:
        DataError: if either part has no window of `length` tokens.
    """
    cuts = [(start, end - int((end - start) * held_out), end) for start, end in pairwise(cache.bounds)]
    train = _windows(cache, [(start, cut) for start, cut, _ in cuts], length, "train")
    evaluation = _windows(cache, [(cut, end) for _, cut, end in cuts], length, "held-out")
    return train, evaluation


def step_starts(windows: Windows, count: int, seed: int, step: int) -> NDArray[np.int64]:
    """Return the first tokens of the `count` windows of a step, (count,), drawn uniformly with replacement."""
    positions = np.array([end - start - windows.length + 1 for start, end in windows.segments])
    last = positions.cumsum()
    drawn = np.random.default_rng((seed, step)).integers(last[-1], size=count)
    segment = np.searchsorted(last, drawn, side="right")
    first = np.array([start for start, _ in windows.segments])
    return np.asarray(first[segment] + drawn - (last - positions)[segment], dtype=np.int64)


def eval_starts(windows: Windows, batches: int, batch_size: int) -> NDArray[np.int64]:
    """Return the first tokens of disjoint, evenly spread held-out windows, (at most `batches`, batch_size).

    Raises:
        DataError: if the held-out text has fewer than `batch_size` windows.
    """
    starts = np.fromiter(_disjoint(windows), dtype=np.int64)
    batches = min(batches, starts.size // batch_size)
    if batches == 0:
        hint = "write a larger --held-out or a smaller --seq-len, or pass more text"
        raise DataError(f"--data: the held-out text has {starts.size} windows, but a batch needs {batch_size}; {hint}")
    chosen = np.linspace(0, starts.size - 1, batches * batch_size).round().astype(np.int64)
    return starts[chosen].reshape(batches, batch_size)


def _disjoint(windows: Windows) -> Iterator[int]:
    for start, end in windows.segments:
        yield from range(start, end - windows.length + 1, windows.length)


def _windows(cache: TokenCache, segments: list[Segment], length: int, name: str) -> Windows:
    kept = tuple((start, end) for start, end in segments if end - start >= length)
    if not kept:
        total = sum(end - start for start, end in segments)
        hint = "write a smaller --seq-len, another --held-out, or pass more text"
        raise DataError(f"--data: no file has {length} {name} tokens (--seq-len); all have {total} together; {hint}")
    return Windows(cache, kept, length)
