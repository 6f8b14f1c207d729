from pathlib import Path

import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.tokens import END_OF_TEXT, load_tokenizer, train_tokenizer


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
