"""The few operations that compression is made of, one table of implementations a device type.

`reference` is plain torch and defines what every other implementation must return, bit for bit.
"""

from types import MappingProxyType, ModuleType

import torch

from deepspeed_compress.kernels import reference

__all__ = ["IMPLEMENTATIONS", "for_device"]

IMPLEMENTATIONS: MappingProxyType[str, ModuleType] = MappingProxyType({"cpu": reference, "cuda": reference})


def for_device(device: torch.device) -> ModuleType:
    """The implementation for tensors on `device`; KeyError names a device type that has none."""
    return IMPLEMENTATIONS[device.type]
