"""Configurations are read as DeepSpeed does, or refused by name, and copies of them have no secrets."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import masked, read_ds_config
from deepspeed_compress.config.loading import MASK
from deepspeed_compress.errors import ConfigError

CONFIG = {"train_batch_size": 8, "deepspeed_compress": {"gradients": {"bits": 4}}}
HJSON = """{
  # a comment
  train_batch_size: 8
  deepspeed_compress: {gradients: {bits: 4,}}
}"""


@pytest.mark.parametrize("text", [json.dumps(CONFIG), HJSON, "\ufeff" + json.dumps(CONFIG)])
def test_files_read_as_json_or_hjson(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    assert read_ds_config(path) == read_ds_config(str(path)) == CONFIG


def test_dict_and_base64() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    assert read_ds_config(CONFIG) == read_ds_config(encoded) == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "a": 1,,\n}', "line 2, column 10: .*Correct the syntax"),
        ('{"a": [1, 2', "line 1, column"),
        ("[1]", "outermost value is no object. Write an object"),
        ("null", "outermost value is no object"),
        ('{"a": 1, "a": 2}', "duplicate keys 'a', "),
        ('{"x": [{"a": 1, "b": 1, "a": 2}]}', "duplicate keys 'a', "),
        ("{x: {a: 1, a: 2}}", "duplicate keys 'a', "),
        ('{"x": ' * 100_000, "recursion"),
    ],
)
def test_unusable_text_names_the_file_and_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_ds_config(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["missing.json", "abcd", "a" * 5000, ""])
def test_missing_file(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file, .* Write the path"):
        read_ds_config(name)


def test_base64_with_a_syntax_error_says_so() -> None:
    with pytest.raises(ConfigError, match="base64-encoded configuration: line 1"):
        read_ds_config(base64.b64encode(b'{"a": ').decode())


def test_directory_and_binary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        read_ds_config(tmp_path)
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"model\.bin: not UTF-8"):
        read_ds_config(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ds_config(path)


def test_a_float_stays_one(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"optimizer": {"params": {"betas": [0.0, 0.95]}}}')
    assert isinstance(read_ds_config(tmp_path / "ds_config.json")["optimizer"]["params"]["betas"][0], float)


def test_a_named_pipe_is_refused_and_an_opened_one_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: a FIFO \(allowed: a regular file\)"):
        read_ds_config(tmp_path / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b'{"train_batch_size": 1}')
    os.close(writing)
    assert read_ds_config(f"/dev/fd/{reading}") == {"train_batch_size": 1}
    os.close(reading)


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
