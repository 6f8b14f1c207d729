"""The primitive operations of compression, with one implementation per kind of device.

`reference` is plain torch and defines the results of the other implementations: `cpu` is C++, `gpu` is Triton.
"""

import functools
import importlib
import os
import warnings
from collections.abc import Mapping
from types import ModuleType

import torch

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.errors import CompressWarning

__all__ = ["FASTEST", "SWITCH", "for_device", "implementations"]

FASTEST: Mapping[str, str] = {"cpu": "cpu", "cuda": "gpu"}
"""Device type to the module with the fastest implementation."""
SWITCH = "DEEPSPEED_COMPRESS_KERNELS"
"""Environment variable. "torch" selects plain torch, which is slower."""
_MISSING: Mapping[str, str] = {
    "cpu": "a C++ compiler (g++, or $CXX) and ninja are needed: apt-get install g++; pip install ninja",
    "cuda": "Triton 3.6 or newer is needed, which PyTorch 2.11 brings: pip install 'torch>=2.11'",
}


def for_device(device: torch.device) -> ModuleType:
    """Return the kernels module for tensors on `device`.

    Warns once if the fast implementation cannot be loaded and plain torch is used.

    Raises:
        KeyError: the device type has no implementation.
    """
    return _implementation(device.type)


@functools.cache
def _implementation(device_type: str) -> ModuleType:
    module = FASTEST[device_type]
    if os.environ.get(SWITCH) == "torch":
        return reference
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        warnings.warn(
            f"compression runs on plain torch, several times slower than its own kernels for {device_type} tensors: "
            f"{reason[0]}; {_MISSING[device_type]}. Set {SWITCH}=torch to use plain torch without this warning",
            CompressWarning,
            stacklevel=3,
        )
        return reference


def implementations(device: torch.device) -> dict[str, ModuleType]:
    """Return all implementations for tensors on `device` by name, starting with the one in use."""
    chosen = for_device(device)
    return {
        name: module
        for name, module in ((FASTEST[device.type], chosen), ("reference", reference))
        if name == "reference" or chosen is not reference
    }
