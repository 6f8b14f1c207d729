"""Tokenizer and token cache: a corpus that is encoded once and read through a memory map, and each step's tokens.

`<directory>/<key>.bin` holds the tokens of all files one after another, as little-endian uint16 or uint32.
`<key>.json` has the start of each file. The key is a digest of the texts and the tokenizer, so a cache never serves
other data. The .json is written last: if it exists, the cache is complete.

There is no iterator state: (seed, n) determine what step n reads. So a resumed run continues exactly, and the batch of
a step is the same with any number of data-parallel ranks.

The tokenizer is a directory that transformers loads. Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2) can
encode any text, so there is no unknown token. The only special token ends each document.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deepspeed_compress.errors import DataError
from deepspeed_compress.safe_files import write_json, write_text
from deepspeed_compress.training.data.corpus import documents

END_OF_TEXT = "<|endoftext|>"
SAMPLE_CHARS = 200_000_000


def train_tokenizer(files: Iterable[Path], directory: Path, vocab_size: int) -> Path:
    """Train on the first documents of `files`, 200 million characters or more, write `directory`, and return it.

    A small corpus may give fewer than `vocab_size` tokens. tokenizer.json is written last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(files, SAMPLE_CHARS), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "tokenizer_config.json", config)
    write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    return directory


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `directory`.

    Raises:
        DataError: if it names no token that ends a document.
    """
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    if loaded.eos_token_id is None:
        raise DataError(
            f"--tokenizer {directory}: names no token to end documents; write one that it has as eos_token in "
            "tokenizer_config.json"
        )
    return loaded


def _sample(files: Iterable[Path], limit: int) -> Iterator[str]:
    """Yield documents until `limit` characters are read."""
    for file in files:
        for document in documents(file):
            yield document
            limit -= len(document)
            if limit <= 0:
                return


@dataclass(frozen=True)
class TokenCache:
    """Encoded corpus: `tokens` (n,) is a read-only memory map, and file i is tokens[bounds[i]:bounds[i + 1]]."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    bounds: tuple[int, ...]
    vocab_size: int


def cache_key(files: list[Path], tokenizer: Path) -> str:
    """Return 32 hexadecimal digits from the content of `files` in order and of the tokenizer."""
    digest = hashlib.sha256(b"format 1")
    for file in [tokenizer / "tokenizer.json", *files]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def build_cache(files: list[Path], tokenizer: Path, directory: Path, key: str) -> None:
    """Encode `files` into `directory` under `key`, unless that cache exists."""
    index = directory / f"{key}.json"
    if index.is_file():
        return
    loaded = load_tokenizer(tokenizer)
    vocab_size = loaded.backend_tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    encoded = [np.fromiter(_encoded(file, loaded), dtype) for file in files]
    directory.mkdir(parents=True, exist_ok=True)
    np.concatenate(encoded).tofile(directory / f"{key}.bin")
    bounds = np.cumsum([0, *map(len, encoded)]).tolist()
    write_json(index, {"dtype": dtype.str, "vocab_size": vocab_size, "bounds": bounds})


def _encoded(file: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[int]:
    """Yield the tokens of a file."""
    for document in documents(file):
        yield from tokenizer.backend_tokenizer.encode(document, add_special_tokens=False).ids
        yield tokenizer.eos_token_id


def open_cache(directory: Path, key: str) -> TokenCache:
    """Map a cache that `build_cache` made."""
    index = json.loads((directory / f"{key}.json").read_text(encoding="utf-8"))
    tokens = np.memmap(directory / f"{key}.bin", index["dtype"], mode="r", shape=(index["bounds"][-1],))
    return TokenCache(tokens, tuple(index["bounds"]), index["vocab_size"])


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
    starts = np.concatenate(
        [np.arange(start, end - windows.length + 1, windows.length) for start, end in windows.segments]
    )
    batches = min(batches, starts.size // batch_size)
    if batches == 0:
        hint = "write a larger --held-out or a smaller --seq-len, or pass more text"
        raise DataError(f"--data: the held-out text has {starts.size} windows, but a batch needs {batch_size}; {hint}")
    chosen = np.linspace(0, starts.size - 1, batches * batch_size).round().astype(np.int64)
    return starts[chosen].reshape(batches, batch_size)


def _windows(cache: TokenCache, segments: list[Segment], length: int, name: str) -> Windows:
    kept = tuple((start, end) for start, end in segments if end - start >= length)
    if not kept:
        total = sum(end - start for start, end in segments)
        hint = "write a smaller --seq-len, another --held-out, or pass more text"
        raise DataError(f"--data: no file has {length} {name} tokens (--seq-len); all have {total} together; {hint}")
    return Windows(cache, kept, length)
