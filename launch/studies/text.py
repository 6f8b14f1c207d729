"""Text of a study, which is encoded once for all runs."""

import argparse
from pathlib import Path

from deepspeed_compress.models import read_model_config
from deepspeed_compress.training.data import build_cache, cache_key, text_files, train_tokenizer

__all__ = ["cache_dir", "prepare_data"]


def cache_dir(options: argparse.Namespace) -> Path:
    """Return the directory of the tokens."""
    path: Path = options.output_dir / "tokenizer" / "tokens"
    return path


def prepare_data(options: argparse.Namespace) -> str:
    """Train the tokenizer and encode the text unless that is done. Return the key of the tokens."""
    files, tokenizer = text_files(options.data), options.output_dir / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        train_tokenizer(files, tokenizer, read_model_config(options.model).vocab_size)
    key = cache_key(files, tokenizer)
    build_cache(files, tokenizer, cache_dir(options), key)
    return key
