from pathlib import Path

import numpy as np
import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.corpus import documents
from deepspeed_compress.training.data.tokens import (
    END_OF_TEXT,
    TokenCache,
    build_cache,
    cache_key,
    load_tokenizer,
    open_cache,
    train_tokenizer,
)


def build_and_open(files: list[Path], tokenizer: Path, directory: Path) -> TokenCache:
    key = cache_key(files, tokenizer)
    build_cache(files, tokenizer, directory, key)
    return open_cache(directory, key)


def test_a_cache_holds_the_tokens_of_the_corpus(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    cache = build_and_open(corpus, tokenizer, tmp_path)
    text = load_tokenizer(tokenizer).decode(cache.tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(file.read_text(encoding="utf-8") + END_OF_TEXT for file in corpus)
    assert cache.tokens.dtype == np.uint16
    assert isinstance(cache.tokens, np.memmap)
    end = load_tokenizer(tokenizer).eos_token_id
    assert [int(cache.tokens[bound - 1]) for bound in cache.bounds[1:]] == [end, end]


def test_the_key_depends_on_texts_order_and_tokenizer(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a.txt"
    copy.write_bytes(corpus[0].read_bytes())
    key = cache_key(corpus, tokenizer)
    assert cache_key([copy, corpus[1]], tokenizer) == key
    assert cache_key(corpus[::-1], tokenizer) != key
    other = train_tokenizer(corpus, tmp_path / "other", 280)
    assert cache_key(corpus, other) != key
    copy.write_text("changed")
    assert cache_key([copy, corpus[1]], tokenizer) != key


def test_a_built_cache_is_not_built_again(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    build_and_open(corpus, tokenizer, tmp_path)
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    build_and_open(corpus, tokenizer, tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == stamps


def test_a_failed_build_leaves_nothing(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 .* iconv"):
        build_and_open([corpus[0], latin], tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_each_json_line_is_a_document(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert list(documents(file)) == ["one", "two"]
    cache = build_and_open([file], tokenizer, tmp_path / "cache")
    end = load_tokenizer(tokenizer).eos_token_id
    assert cache.tokens.tolist().count(end) == 2


@pytest.mark.parametrize("line", ["[1]", "{}", '{"text": 3}', "{"])
def test_a_json_line_without_text_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=r'd\.jsonl:2: expected a JSON object with a string "text"'):
        list(documents(file))


def test_transformers_loads_the_tokenizer(tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    text = "the king said\n\n  'tis \u2014 na\u00efve \U0001f451"
    ours = load_tokenizer(tokenizer)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids = loaded(text)["input_ids"]
    assert ids == ours.backend_tokenizer.encode(text).ids
    assert loaded.decode(ids) == text
    assert loaded.eos_token_id == ours.eos_token_id == ours.convert_tokens_to_ids(END_OF_TEXT)


def test_training_is_deterministic(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    again = train_tokenizer(corpus, tmp_path / "again", 300)
    assert (again / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert len(load_tokenizer(again)) == 300


def test_a_tokenizer_that_ends_no_document_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="names no token to end documents"):
        load_tokenizer(tmp_path)
