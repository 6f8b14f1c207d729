"""Fixtures with a small corpus and its tokenizer."""

from pathlib import Path

import pytest

from deepspeed_compress.training.data.tokens import train_tokenizer

WORDS = "the king said nothing, for who would answer?\n\n  'Tis late; it's cold \u2014 na\u00efve\tnight 1604. "


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("corpus")
    files = [directory / "a.txt", directory / "b.txt"]
    files[0].write_text(WORDS * 60, encoding="utf-8")
    files[1].write_text("Enter a ghost.\n" * 90, encoding="utf-8")
    return files


@pytest.fixture(scope="session")
def tokenizer(corpus: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(corpus, tmp_path_factory.mktemp("parent") / "tokenizer", 300)
