"""Secrets that a copy of a configuration hides."""

import json
from typing import Any

import pytest

from deepspeed_compress.config import masked
from deepspeed_compress.config.loading import MASK

SECRETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"api_key": "abc"}, {"api_key": MASK}),
    ({"comet": {"enabled": True, "apiKey": "abc"}}, {"comet": {"enabled": True, "apiKey": MASK}}),
    ({"HF_TOKEN": "abc", "PASSWORD": 1234}, {"HF_TOKEN": MASK, "PASSWORD": MASK}),
    ({"aws-secret-access-key": "abc"}, {"aws-secret-access-key": MASK}),
    ({"credentials": {"user": "me", "parts": ["a", "b"]}}, {"credentials": {"user": MASK, "parts": [MASK, MASK]}}),
    ({"loggers": [{"token": "abc"}]}, {"loggers": [{"token": MASK}]}),
    ({"host": "https://me:abc@example.org/x"}, {"host": f"https://{MASK}@example.org/x"}),
    ({"host": "https://example.org/x?api_key=abc&n=1"}, {"host": f"https://example.org/x?api_key={MASK}&n=1"}),
    ({"env": ["WANDB_API_KEY=abc", "A=1"]}, {"env": [f"WANDB_API_KEY={MASK}", "A=1"]}),
    ({"headers": {"Authorization": "Bearer abc"}}, {"headers": {"Authorization": MASK}}),
]


@pytest.mark.parametrize(("config", "shown"), SECRETS)
def test_secrets_are_masked_at_any_depth(config: dict[str, Any], shown: dict[str, Any]) -> None:
    assert masked(config) == shown
    assert "abc" not in json.dumps(masked({"monitor": [config]}))


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "wandb": {"enabled": True, "project": "keyboard"}},
        {"max_tokens": 512, "keys": 4, "api_key": None, "token": "", "use_token": True},
        {"host": "https://example.org/monkeys", "path": "a@b", "tokenizer": "gpt2", "monkey": "x"},
    ],
)
def test_everything_else_stays(config: dict[str, Any]) -> None:
    assert masked(config) == config


def test_the_original_is_not_changed() -> None:
    config = {"comet": {"api_key": "abc"}}
    masked(config)
    assert config == {"comet": {"api_key": "abc"}}
