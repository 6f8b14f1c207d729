"""Compressed communication for DeepSpeed training, chosen in one section of ds_config.json.

Importing the package is light: torch and deepspeed are loaded when an entry point is first used.
"""

import atexit
import gc
import sys
import warnings
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


@atexit.register
def _check_engines() -> None:
    """Issue a CompressWarning if engines have the section but the program never used an entry point.

    `import deepspeed_compress` alone compresses nothing, and DeepSpeed ignores sections that it does not know. Noticing
    an engine when it is made would require importing and patching DeepSpeed. At exit, engines can be found at no cost.
    """
    made = vars(sys.modules.get("deepspeed.runtime.engine", object)).get("DeepSpeedEngine")
    # If this module is loaded, the program has used an entry point, which reports its own problems.
    if made is None or "deepspeed_compress.backends.deepspeed" in sys.modules:
        return
    # Not isinstance, which reads `__class__`: some objects import modules when it is read.
    engines = [one for one in gc.get_objects() if issubclass(type(one), made)]
    if any(__name__ in getattr(vars(engine).get("_config"), "_param_dict", ()) for engine in engines):
        text = (
            f'nothing was compressed: an engine was made with "{__name__}" in its configuration, but not by this '
            "package. Call deepspeed_compress.install() first, call deepspeed_compress.initialize in place of "
            "deepspeed.initialize, or start the program with ds-compress run"
        )
        warnings.warn(text, CompressWarning, stacklevel=1)
