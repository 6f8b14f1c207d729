"""Compressed communication for DeepSpeed training, chosen in one section of ds_config.json.

Importing the package is light: torch and deepspeed are loaded when an entry point is first used.
"""

from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
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
from deepspeed_compress.integrations.at_exit import warn_at_exit

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
    "detach",
    "initialize",
    "install",
]

__version__ = "0.1.0"

_LOADED_ON_USE = MappingProxyType(
    {"attach": "engine.attach", "detach": "engine.attach", "initialize": "engine.attach", "install": "integrations"}
)
"""Entry points, and the modules that they are in."""

NEEDED_TO_TRAIN = ("deepspeed", "numpy", "packaging", "safetensors", "torch")
INSTALL_TO_TRAIN = 'pip install "deepspeed-compress[train]"'


def __getattr__(name: str) -> Any:
    """Entry points, imported on first use. ImportError where only what reads files is installed."""
    if name in _LOADED_ON_USE:
        missing = [package for package in NEEDED_TO_TRAIN if find_spec(package) is None]
        if missing:
            raise ImportError(
                f"deepspeed_compress.{name} needs {', '.join(missing)}, which this environment does not have; write: "
                f"{INSTALL_TO_TRAIN}"
            )
        return getattr(import_module(f"deepspeed_compress.{_LOADED_ON_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


warn_at_exit()
