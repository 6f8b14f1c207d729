"""A module that holds a published model without the model's class: parameters by name, and nothing that computes."""

from collections.abc import Mapping

import torch
from torch import nn

from deepspeed_compress.compression.compressors.base import DTYPES
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Dtype, find_versions, read_manifest


def make_holder(store: Store) -> nn.Module:
    """Return a module on the CPU with the names, shapes and type of the newest version in `store`, for a `Receiver`.

    Its values are zero until the receiver updates it.

    Raises:
        RolloutError: nothing has been published.
    """
    versions = find_versions(store)
    if not versions:
        raise RolloutError("nothing has been published yet: publish the initial weights first")
    manifest = read_manifest(store, max(versions))
    return make_module(manifest.tensors, manifest.dtype)


def make_module(tensors: Mapping[str, tuple[int, ...]], dtype: Dtype) -> nn.Module:
    """Return a module on the CPU with parameters of these names and shapes, whose values are zero."""
    root = nn.Module()
    for name, shape in tensors.items():
        parent = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=DTYPES[dtype]), requires_grad=False))
    return root
