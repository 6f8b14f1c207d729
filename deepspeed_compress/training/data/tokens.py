"""Tokenizer and token cache: a corpus that is encoded once and read through a memory map, and each step's tokens.

`<directory>/<key>.bin` holds the tokens of all files one after another, as little-endian uint16 or uint32.
`<key>.json` has the start of each file. The key is a digest of the texts and the tokenizer, so a cache never serves
other data. Both files are written under temporary names and renamed, the .json last: if it exists, the cache is
complete.

There is no iterator state: (seed, n) determine what step n reads. So a resumed run continues exactly, and the batch of
a step is the same with any number of data-parallel ranks.

The tokenizer is a directory with tokenizer.json, which transformers loads. Byte-level BPE as in GPT-2 (Radford et al.
2019, section 2.2) can encode any text, so there is no unknown token. The only special token ends each document.
"""

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deepspeed_compress.errors import DataError
from deepspeed_compress.safe_files import replacing
from deepspeed_compress.training.data.corpus import CHUNK_CHARS, documents

END_OF_TEXT = "<|endoftext|>"
SAMPLE_CHARS = 200_000_000
MIN_VOCAB = 257
"""Smallest vocabulary: 256 bytes and the special token."""


def train_tokenizer(files: Iterable[Path], directory: Path, vocab_size: int) -> Path:
    """Train on the first 200 million characters of `files`, write `directory`, and return it.

    A small corpus may give fewer than `vocab_size` tokens. The directory appears complete or not at all.

    Raises:
        DataError: if a file cannot be read or `vocab_size` is less than 257.
    """
    if vocab_size < MIN_VOCAB:
        raise DataError(f"vocab_size: {vocab_size} is too small for 256 bytes and one special token; write {MIN_VOCAB}")
    tokenizer = _untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(files, SAMPLE_CHARS), trainer)
    _write_whole(directory, tokenizer)
    return directory


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of `directory`, which may be any directory with a tokenizer.json.

    Raises:
        DataError: if there is none, or it cannot be parsed.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"--tokenizer {directory}: contains no tokenizer.json; choose a directory that does")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"--tokenizer {directory}: tokenizer.json cannot be read: {error}") from None


def end_token(directory: Path, tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document: `eos_token` of tokenizer_config.json, else <|endoftext|>.

    Raises:
        DataError: if the vocabulary does not have that token.
    """
    name = _named_end_token(directory / "tokenizer_config.json") or END_OF_TEXT
    identifier = tokenizer.token_to_id(name)
    if identifier is None:
        raise DataError(
            f"--tokenizer {directory}: its vocabulary has no token {name!r} to end documents; write one that it has as "
            "eos_token in tokenizer_config.json"
        )
    return int(identifier)


def _named_end_token(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        name = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError):
        raise DataError(f"{file}: not a JSON object") from None
    return str(name["content"]) if isinstance(name, dict) else name


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sample(files: Iterable[Path], limit: int) -> Iterator[str]:
    """Yield parts of the text until `limit` characters are read."""
    for file in files:
        for document in documents(file):
            for piece in document:
                yield piece
                limit -= len(piece)
                if limit <= 0:
                    return


def _write_whole(directory: Path, tokenizer: Tokenizer) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    tokenizer.save(str(scratch / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (scratch / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    scratch.chmod(0o755)
    try:
        os.replace(scratch, directory)
    except OSError as error:
        shutil.rmtree(scratch)
        raise DataError(
            f"--tokenizer {directory}: exists and is not empty, but is not a tokenizer; choose another directory"
        ) from error


FORMAT = 1


@dataclass(frozen=True)
class TokenCache:
    """Encoded corpus: `tokens` (n,) is a read-only memory map, and file i is tokens[bounds[i]:bounds[i + 1]]."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    bounds: tuple[int, ...]
    vocab_size: int


def cache_key(files: list[Path], tokenizer: Path) -> str:
    """Return 32 hexadecimal digits from the content of `files` in order and of the tokenizer.

    Raises:
        DataError: if a file cannot be read.
    """
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    for file in [tokenizer / "tokenizer.json", *files]:
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()[:32]


def build_cache(files: list[Path], tokenizer: Path, directory: Path, key: str, chunk_chars: int = CHUNK_CHARS) -> None:
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
        _encode_all(files, tokenizer, directory, key, chunk_chars)
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


def _encode_all(files: list[Path], tokenizer: Path, directory: Path, key: str, chunk_chars: int) -> None:
    loaded = load_tokenizer(tokenizer)
    vocab_size, end = loaded.get_vocab_size(), end_token(tokenizer, loaded)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    bounds = [0]
    with _replacing(_token_file(directory, key)) as stream:
        for file in files:
            bounds.append(bounds[-1])
            for tokens in _encoded(file, loaded, end, chunk_chars):
                stream.write(np.asarray(tokens, dtype=dtype).tobytes())
                bounds[-1] += len(tokens)
    with _replacing(_index_file(directory, key)) as stream:
        index = {"format": FORMAT, "dtype": dtype.str, "vocab_size": vocab_size, "bounds": bounds}
        stream.write(json.dumps(index | {"files": [str(file) for file in files]}).encode())


def _encoded(file: Path, tokenizer: Tokenizer, end: int, chunk_chars: int) -> Iterator[list[int]]:
    """Yield the tokens of each part of the text."""
    for document in documents(file, chunk_chars):
        for piece in document:
            yield tokenizer.encode(piece, add_special_tokens=False).ids
        yield [end]


def _replacing(target: Path) -> AbstractContextManager[BinaryIO]:
    """Return a context that replaces `target` by a new file. Ranks of several hosts may write the same one."""
    return replacing(target, target.with_name(f".{target.name}-{secrets.token_hex(8)}"))


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
