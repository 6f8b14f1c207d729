"""A toy language model and a cache of tokens to train it on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_compress.training.data.tokens import build_cache, cache_key, train_tokenizer
from tests.support.model_configs import GPT2

VOCABULARY = 300
MODEL = {**GPT2, "n_layer": 1}


class ToyFiles:
    """Files of the toy `model`, a text, and the cached tokens of the text.

    Attributes:
        text: text file.
        model: configuration file of the model.
        cache: directory of the tokens.
        key: key of the tokens in `cache`.
    """

    def __init__(self, directory: Path, model: Mapping[str, Any] = MODEL) -> None:
        self.text, self.model, self.cache = directory / "text.txt", directory / "model.json", directory / "cache"
        self.text.write_text("the king said nothing, for who would answer?\n'Tis late; it's cold. " * 400)
        self.model.write_text(json.dumps(model))
        tokenizer = train_tokenizer([self.text], directory / "tokenizer", VOCABULARY)
        self.key = cache_key([self.text], tokenizer)
        build_cache([self.text], tokenizer, self.cache, self.key)
