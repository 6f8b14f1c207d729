"""Compressed communication for DeepSpeed training, chosen in one section of ds_config.json.

Importing the package is light: torch and deepspeed are loaded when an entry point is first used.
"""

from importlib import import_module
from typing import Any

from deepspeed_compress.errors import (
    CompressError,
    CompressWarning,
    ConfigError,
    DataError,
    SeamError,
    StateError,
    UnsupportedError,
)
from deepspeed_compress.version import __version__

__all__ = [
    "CompressError",
    "CompressWarning",
    "ConfigError",
    "DataError",
    "SeamError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "attach",
    "initialize",
    "install",
]

_ENGINE_NAMES = ("attach", "initialize", "install")


def __getattr__(name: str) -> Any:
    """Entry points, imported on first use."""
    if name in _ENGINE_NAMES:
        return getattr(import_module("deepspeed_compress.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
