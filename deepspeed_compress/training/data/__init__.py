"""Conversion of text into token windows: the corpus, the tokenizer, the token cache, and the data of each step.

corpus      the example text, the text files of a run, and the documents in them
tokens      trains and loads a byte-level BPE tokenizer directory, encodes a corpus once into a memory-mapped file, and
            selects the windows that a step reads
"""

from deepspeed_compress.training.data.corpus import fetch_corpus, text_files
from deepspeed_compress.training.data.tokens import (
    TokenCache,
    Windows,
    build_cache,
    cache_key,
    eval_starts,
    load_tokenizer,
    open_cache,
    split_windows,
    step_starts,
    train_tokenizer,
)

__all__ = [
    "TokenCache",
    "Windows",
    "build_cache",
    "cache_key",
    "eval_starts",
    "fetch_corpus",
    "load_tokenizer",
    "open_cache",
    "split_windows",
    "step_starts",
    "text_files",
    "train_tokenizer",
]
