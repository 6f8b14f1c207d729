"""Copies of a configuration without secrets: passwords, tokens and keys of services that a run reports to."""

import re
from collections.abc import Mapping
from typing import Any

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
        return {key: _hidden(value, str(key)) if _secret(str(key)) else masked(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [masked(value) for value in config]
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(MASK, config)) if isinstance(config, str) else config


def _words(key: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(key)}


def _secret(key: str) -> bool:
    return bool(_words(key) & (_ALWAYS | _TEXT))


def _hidden(value: Any, key: str) -> Any:
    """Mask everything below a secret key."""
    if isinstance(value, Mapping):
        return {inner: _hidden(below, key) for inner, below in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(below, key) for below in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if (isinstance(value, str) and value) or (number and _words(key) & _ALWAYS) else value
