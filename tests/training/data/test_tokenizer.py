import json
from pathlib import Path

import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.tokens import END_OF_TEXT, end_token, load_tokenizer, train_tokenizer


def test_transformers_loads_the_tokenizer(tokenizer: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = "the king said\n\n  'tis \u2014 na\u00efve \U0001f451"
    ours = load_tokenizer(tokenizer).encode(text).ids
    for loaded in (
        PreTrainedTokenizerFast.from_pretrained(tokenizer),
        AutoTokenizer.from_pretrained(tokenizer),
    ):
        assert loaded(text)["input_ids"] == ours
        assert loaded.decode(ours) == text
        assert loaded.eos_token_id == load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)


def test_training_is_deterministic(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    again = train_tokenizer(corpus, tmp_path / "again", 300)
    assert (again / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert load_tokenizer(again).get_vocab_size() == 300


def test_a_vocabulary_needs_all_bytes(corpus: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size: 256 is too small"):
        train_tokenizer(corpus, tmp_path / "t", 256)


def test_a_directory_with_other_files_is_kept(corpus: list[Path], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("x")
    with pytest.raises(DataError, match="is not a tokenizer"):
        train_tokenizer(corpus, tmp_path / "taken", 280)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("eos", "name"), [("a", "a"), ({"content": "b"}, "b"), (None, END_OF_TEXT)])
def test_the_end_token_is_read_from_the_configuration(tokenizer: Path, tmp_path: Path, eos: object, name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = load_tokenizer(tokenizer)
    assert end_token(tmp_path, loaded) == loaded.token_to_id(name)


def test_an_end_token_outside_the_vocabulary_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(DataError, match="no token '<none>'"):
        end_token(tmp_path, load_tokenizer(tokenizer))
