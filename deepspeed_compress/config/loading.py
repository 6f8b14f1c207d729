"""Reading of a DeepSpeed configuration as DeepSpeed does (dict, HJSON file, base64), and copies without secrets."""

import base64
import collections
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import check_regular


def read_ds_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in `source`: a dict, the path of an HJSON (or JSON) file, or base64 of its text.

    Raises:
        ConfigError: naming the path, for a missing or unreadable file, a syntax error (with line and column), a
            duplicate key, or an outermost value that is not an object.
    """
    if isinstance(source, dict):
        return dict(source)
    if os.path.exists(source):
        return _parse(_read(Path(source)), str(source))
    try:
        text = base64.b64decode(str(source), altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        text = ""
    # A file name may happen to be valid base64, but hardly of text that looks like an object.
    if "{" not in text and ":" not in text:
        raise ConfigError(
            f"{source}: no such file, and no configuration in base64. Write the path of a ds_config.json."
        )
    return _parse(text, "base64-encoded configuration")


def _read(path: Path) -> str:
    try:
        if not path.is_dir():
            check_regular(str(path))
        return path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a directory. Write the path of a file inside it.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Make the file readable.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file with UTF-8 encoding.") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        try:
            config = json.loads(text, object_pairs_hook=_build)
        except json.JSONDecodeError:
            # hjson reads JSON too, but turns 0.0 into an integer, which PyTorch refuses next to float betas.
            config = hjson.loads(text, object_pairs_hook=_build)
    except hjson.HjsonDecodeError as error:
        place = f"{name}: line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{place}: {error.msg}. Correct the syntax there.") from error
    except (ValueError, RecursionError) as error:  # such as a number with more digits than Python reads
        raise ConfigError(f"{name}: {error}. Correct the value.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: the outermost value is no object. Write an object {{...}}.")
    return config


def _build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return one object. Raises ValueError if it has a key twice, as DeepSpeed does."""
    twice = sorted(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
    if twice:
        keys = ", ".join(map(repr, twice))
        raise ValueError(f"duplicate keys {keys}, whose lines `ds-compress lint` shows. Write each key once")
    return dict(pairs)


MASK = "***"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""Words of "apiKey", "API_KEY", "api-key" and "apikey2"."""
_ALWAYS = frozenset({"password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"})
_TEXT = frozenset({"key", "keys", "apikey", "token", "tokens", "auth", "authorization", "bearer", "cookie", "cookies"})
"""Words that may also name numbers, which are not masked."""
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ASSIGNED = re.compile(r"(?i)\b([\w.-]*(?:key|token|secret|passw(?:or)?d|credential|signature)[\w.-]*=)[^&;,\s]+")
"""Secret in the query of an address, or in NAME=value."""


def masked(config: Any) -> Any:
    """Return `config` with `MASK` in place of values under secret keys, at any depth, and of credentials in texts."""
    if isinstance(config, Mapping):
        secret = {key for key in config if _words(str(key)) & (_ALWAYS | _TEXT)}
        return {key: _hidden(value, str(key)) if key in secret else masked(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [masked(value) for value in config]
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(MASK, config)) if isinstance(config, str) else config


def _words(key: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(key)}


def _hidden(value: Any, key: str) -> Any:
    """Mask everything below a secret key."""
    if isinstance(value, Mapping):
        return {inner: _hidden(below, key) for inner, below in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(below, key) for below in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if (isinstance(value, str) and value) or (number and _words(key) & _ALWAYS) else value
