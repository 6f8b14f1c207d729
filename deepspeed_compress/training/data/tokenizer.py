"""Byte-level BPE tokenizer, saved as a directory with tokenizer.json that transformers loads.

Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2) can encode any text, so there is no unknown token. The
only special token ends each document.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.corpus import documents

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
