"""Parameters of a receiving module, to which slices of a version are applied, and modules that have nothing else."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepspeed_compress.compression.compressors.base import DTYPES
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.changes import apply
from deepspeed_compress.rollout.parts import EncodedSlice, SliceDigest, values_digest
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Dtype, Manifest, find_versions, model_digest, read_manifest


class ModuleWeights:
    """Parameters of a module that hold a published model.

    Args:
        module: the module.
        manifest: the version that the module will hold.

    Raises:
        RolloutError: the module has other parameters than the published model.
    """

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        self._manifest, self._dtype = manifest, DTYPES[manifest.dtype]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _check(parameters, manifest.tensors, self._dtype)
        self._tensors = {name: parameters[name].detach() for name in manifest.tensors}

    def apply(self, one: EncodedSlice) -> NDArray[np.int64] | None:
        """Bring a slice to its next version, in place.

        Returns:
            The positions of the changed values in the flattened parameter; None if any of them may have changed.

        Raises:
            RolloutError: the change is malformed or made for another tensor.
        """
        place = self._place(one.slice)
        held = self._published(place)
        changed = apply(one.payload, held)
        if held.data_ptr() != place.data_ptr():
            place.copy_(held.view(place.shape))
        if changed is None or one.slice.rows == 1:
            return None if changed is None else changed + one.slice.start
        row, column = np.divmod(changed, place.shape[1])
        return one.slice.start + row * one.slice.stride + column

    def verify(self, slices: Sequence[SliceDigest]) -> None:
        """Check that the module holds the version of the manifest, of which `slices` are all digests.

        Raises:
            RolloutError: it does not.
        """
        if model_digest(slices) != self._manifest.digest:
            raise RolloutError(f"the parts are not those of version {self._manifest.version}")
        for one in slices:
            if values_digest(self._published(self._place(one))) != one.digest:
                raise RolloutError(f'"{one.name}" differs from what version {self._manifest.version} should be')

    def _place(self, one: SliceDigest) -> Tensor:
        """Return the elements of a slice as a view of the module's parameter, of shape [rows, elements of a row]."""
        tensor, width = self._tensors.get(one.name), one.numel // one.rows
        end = one.start + (one.rows - 1) * one.stride + width
        in_order = one.rows == 1 or one.stride >= width
        if tensor is None or not in_order or width * one.rows != one.numel or end > tensor.numel():
            raise RolloutError(f'a part has elements {one.start} to {end} of an unknown "{one.name}"')
        return tensor.view(-1).as_strided(
            (one.rows, width), (one.stride or width, 1), tensor.storage_offset() + one.start
        )

    def _published(self, place: Tensor) -> Tensor:
        """Return the values, flat, in the published type on the CPU: those of `place` itself if it is so, or a copy."""
        return place.to("cpu", self._dtype).reshape(-1)


def _check(parameters: Mapping[str, Tensor], tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    for name, shape in tensors.items():
        if name not in parameters:
            raise RolloutError(f'the module has no parameter "{name}", which is published')
        own = parameters[name]
        if tuple(own.shape) != shape:
            raise RolloutError(f'"{name}" has the shape {tuple(own.shape)}, but {shape} is published')
        if own.is_meta or not own.is_contiguous():
            raise RolloutError(f'"{name}" is on the meta device or not contiguous, so it cannot be updated in place')
        if torch.promote_types(own.dtype, dtype) != own.dtype:
            raise RolloutError(f'"{name}" has the type {own.dtype}, which does not hold all values of {dtype}')
    published = {id(parameters[name]): name for name in tensors}
    for name in tensors:
        last = published[id(parameters[name])]
        if last != name:
            raise RolloutError(f'"{name}" and "{last}" are one parameter of the module, but two are published')
    missing = [name for name, own in parameters.items() if own.numel() and id(own) not in published]
    if missing:
        raise RolloutError(f"the module has parameters that are not published: {', '.join(missing[:3])}")


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
