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
    IslandError,
    RolloutError,
    SeamError,
    StateError,
    UnsupportedError,
    install_command,
)
from deepspeed_compress.program_warnings import warn_at_exit

__all__ = [
    "CompressError",
    "CompressWarning",
    "ConfigError",
    "DataError",
    "IslandError",
    "RolloutError",
    "SeamError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "attach",
    "ddp",
    "detach",
    "fsdp2",
    "initialize",
    "install",
    "megatron",
]

__version__ = "0.1.0"

_LOADED_ON_USE = MappingProxyType(
    {
        "attach": "backends.deepspeed.attach",
        "detach": "backends.deepspeed.attach",
        "initialize": "backends.deepspeed.initialize",
        "install": "integrations",
    }
)
"""Entry points, and the modules that define them."""
_BACKENDS = frozenset({"ddp", "fsdp2", "megatron"})
"""Public packages of `backends`, each for an engine other than DeepSpeed."""

NEEDED_EVERYWHERE = ("numpy", "packaging", "safetensors", "torch")
NEEDED_TO_TRAIN = ("deepspeed", *NEEDED_EVERYWHERE)
INSTALL_TO_TRAIN = install_command("train")


def __getattr__(name: str) -> Any:
    """Return an entry point, importing it on first use.

    Raises:
        AttributeError: if there is no such entry point.
        ImportError: if only the packages that read files are installed.
    """
    if name in _LOADED_ON_USE:
        _check_installed(name, NEEDED_TO_TRAIN)
        return getattr(import_module(f"deepspeed_compress.{_LOADED_ON_USE[name]}"), name)
    if name in _BACKENDS:
        _check_installed(name, NEEDED_EVERYWHERE)
        return import_module(f"deepspeed_compress.backends.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_installed(name: str, needed: tuple[str, ...]) -> None:
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ImportError(f"deepspeed_compress.{name} needs {', '.join(missing)}; write: {INSTALL_TO_TRAIN}")


warn_at_exit()
