import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.corpus import documents, split_at_words
from deepspeed_compress.training.data.tokens import (
    END_OF_TEXT,
    TokenCache,
    build_cache,
    cache_key,
    load_tokenizer,
    open_cache,
    train_tokenizer,
)
from tests.support.properties import properties


def build_and_open(files: list[Path], tokenizer: Path, directory: Path, chunk_chars: int = 1 << 20) -> TokenCache:
    key = cache_key(files, tokenizer)
    build_cache(files, tokenizer, directory, key, chunk_chars=chunk_chars)
    return open_cache(directory, key)


def test_a_cache_holds_the_tokens_of_the_corpus(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    cache = build_and_open(corpus, tokenizer, tmp_path)
    text = load_tokenizer(tokenizer).decode(cache.tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(file.read_text(encoding="utf-8") + END_OF_TEXT for file in corpus)
    assert cache.tokens.dtype == np.uint16
    assert isinstance(cache.tokens, np.memmap)
    end = load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)
    assert [int(cache.tokens[bound - 1]) for bound in cache.bounds[1:]] == [end, end]


@pytest.mark.parametrize("chunk_chars", [7, 64, 1000])
def test_reading_in_chunks_changes_nothing(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, chunk_chars: int
) -> None:
    whole = build_and_open(corpus, tokenizer, tmp_path / "whole")
    parts = build_and_open(corpus, tokenizer, tmp_path / "parts", chunk_chars)
    assert np.array_equal(whole.tokens, parts.tokens)
    assert whole.bounds == parts.bounds


@properties
@given(st.lists(st.text(alphabet="ab \n\t.'s1\u00e9", max_size=9), max_size=9))
def test_splitting_keeps_text_and_tokens(pieces: list[str]) -> None:
    from tokenizers import pre_tokenizers

    def split(text: str) -> list[str]:
        return [token for token, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]

    cut = list(split_at_words(pieces, limit=10_000))
    assert "".join(cut) == "".join(pieces)
    assert [token for piece in cut for token in split(piece)] == split("".join(pieces))


def test_text_without_spaces_is_cut_at_the_limit() -> None:
    pieces = list(split_at_words(["x" * 10] * 10, limit=25))
    assert max(map(len, pieces)) == 30
    assert "".join(pieces) == "x" * 100


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


def test_concurrent_builds_leave_one_cache(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    key = cache_key(corpus, tokenizer)
    threads = [threading.Thread(target=build_cache, args=(corpus, tokenizer, tmp_path, key)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {file.name for file in tmp_path.iterdir()} == {f"{key}.bin", f"{key}.json"}
    assert open_cache(tmp_path, key).bounds[-1] > 0


def test_a_failed_build_leaves_nothing(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 .* iconv"):
        build_and_open([corpus[0], latin], tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_damaged_caches_are_refused(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    key = cache_key(corpus, tokenizer)
    with pytest.raises(DataError, match="missing or damaged"):
        open_cache(tmp_path, key)
    build_cache(corpus, tokenizer, tmp_path, key)
    (tmp_path / f"{key}.bin").write_bytes((tmp_path / f"{key}.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match="truncated; delete it"):
        open_cache(tmp_path, key)


def test_each_json_line_is_a_document(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert ["".join(document) for document in documents(file)] == ["one", "two"]
    cache = build_and_open([file], tokenizer, tmp_path / "cache")
    end = load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)
    assert cache.tokens.tolist().count(end) == 2


@pytest.mark.parametrize("line", ["[1]", "{}", '{"text": 3}', "{"])
def test_a_json_line_without_text_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=r'd\.jsonl:2: expected a JSON object with a string "text"'):
        [list(document) for document in documents(file)]
