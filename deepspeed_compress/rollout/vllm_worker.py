"""Worker's side of the weight transfer backend of vLLM: it pulls versions from a store and loads them.

A worker holds a copy of the published model in host memory, to which changes are applied and whose digest is checked.
From there, a version reaches the engine's own parameters in one of two ways:

- The changed values alone, if all parameters still have the layout that they were created with. vLLM's loader maps the
  positions in a checkpoint to those in its shards and fused parameters.
- All values, by vLLM's layerwise reloading, if it has rearranged parameters after loading, as it does for experts, for
  quantized layers, and for all linear layers on CPU; or if a change has no list of positions.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.checkpoint_names import CheckpointNames
from deepspeed_compress.rollout.module_weights import make_holder
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import find_versions

_PATIENCE = 120.0
"""Seconds in which a version must appear in the store. A network file system may show new files a minute late."""
_POLL = 0.1


@dataclass
class StorePlace(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not see vLLM
    """Place of the published versions: a directory, or the address of a store."""

    place: str


@dataclass
class VersionNumber(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not see vLLM
    """The version to load."""

    version: int


class PublishedWeightsEngine(WeightTransferEngine[StorePlace, VersionNumber]):  # type: ignore[misc]  # mypy does not see vLLM
    """Engine that loads published versions into the model of a worker."""

    init_info_cls = StorePlace
    update_info_cls = VersionNumber
    supports_draft_weight_update = False

    _store: Store | None = None
    _receiver: Receiver | None = None
    """Receiver of the copy in host memory."""
    _loaded = ""
    """Digest of the version that the model has; empty before the first one."""
    _is_loading = False
    """True during a load, and after one that has failed."""

    def init_transfer_engine(self, init_info: StorePlace) -> None:
        """Follow the versions at a place, where none need to be yet."""
        self._store, self._receiver, self._loaded = open_store(init_info.place), None, ""
        self._names, self._changed = CheckpointNames(self.model_config.hf_config), ChangedPositions()

    def start_weight_update(self) -> None:
        """Do nothing: layerwise reloading would begin here, but may not be needed."""

    def finish_weight_update(self) -> None:
        """Do nothing: a version is complete once it was received."""

    def shutdown(self) -> None:
        """Forget the store and the copy."""
        self._store = self._receiver = None

    def receive_weights(self, update_info: VersionNumber) -> None:
        """Bring the worker's model to a version. Call it while no request runs.

        Raises:
            RolloutError: the store is not known, the version cannot be reached, or it has not all parameters of the
                model. A worker that has loaded a part of a version must be restarted.
        """
        if self._store is None:
            raise RolloutError('the worker follows no weights: call init_weight_transfer_engine with {"place": ...}')
        if self._is_loading:
            raise RolloutError("an earlier version was loaded in part, and its rest was not: restart the engine")
        _wait_for(self._store, update_info.version)
        if self._receiver is None:
            self._holder = make_holder(self._store)
            self._receiver = Receiver(self._holder, self._store, self._changed.add)
        self._receiver.update(update_info.version)
        if self._receiver.digest != self._loaded:
            weights = self._names.convert(dict(self._holder.named_parameters()))
            self._is_loading = True
            self._load(weights)
            self._loaded, self._is_loading = self._receiver.digest, False
            self._changed.clear()

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        in_place = bool(self._loaded) and self.vllm_config.lora_config is None
        in_place = in_place and all(map(_keeps_layout, self.model.modules()))
        patches = self._changed.patches(weights, self.device) if in_place else None
        if patches is None:
            _reload(self.model, self.model_config, weights)
        else:
            load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)


class ChangedPositions:
    """Positions of the values that were changed since the last load."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all positions."""
        self._positions: defaultdict[str, list[NDArray[np.int64]]] | None = defaultdict(list)

    def add(self, name: str, positions: NDArray[np.int64] | None) -> None:
        """Add positions in a flattened tensor; None if all of its values may have changed."""
        if positions is None:
            self._positions = None
        elif self._positions is not None and positions.size:
            self._positions[name].append(positions)

    def patches(self, weights: Mapping[str, Tensor], device: torch.device) -> list[CheckpointWeightPatch] | None:
        """Return the changed values as patches; None if they are not known, or if vLLM could not apply them.

        Args:
            weights: all weights, under the names of a checkpoint.
            device: device of the patches.
        """
        if self._positions is None or not self._positions.keys() <= weights.keys():
            return None
        patches = []
        for name, parts in self._positions.items():
            positions = torch.from_numpy(np.unique(np.concatenate(parts)))
            values = weights[name].flatten()[positions]
            # vLLM marks unchanged values by NaNs.
            if values.isnan().any():
                return None
            shape, dtype = tuple(weights[name].shape), values.dtype
            patches.append(CheckpointWeightPatch(name, shape, dtype, values.to(device), positions.to(device)))
        return patches


def _wait_for(store: Store, version: int) -> None:
    """Wait until a version, or a later one, is in the store.

    Raises:
        RolloutError: it does not appear in time.
    """
    until = time.monotonic() + _PATIENCE
    while max(find_versions(store), default=0) < version:
        if time.monotonic() > until:
            late = f"version {version} has not appeared in {_PATIENCE:g} seconds"
            raise RolloutError(f"{late}: the place must be the store as the engine's hosts see it")
        time.sleep(_POLL)


def _keeps_layout(layer: nn.Module) -> bool:
    """Return True if a layer computes with its parameters as they were created, and with nothing made of them."""
    method: Any = getattr(layer, "quant_method", None)
    if not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod | None):
        return False
    if hasattr(layer, "process_weights_after_loading") and not isinstance(layer, Attention):
        return False
    created, _ = get_layerwise_info(layer).restore_metadata
    own = dict(layer.named_parameters(recurse=False))
    return own.keys() == created.keys() and all(_layout(one) == _layout(created[name]) for name, one in own.items())


def _layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _reload(model: nn.Module, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Load all weights of a checkpoint.

    Raises:
        RolloutError: parameters of the model are not among them. vLLM itself only warns about these.
    """
    _forget_packed_experts(model)
    initialize_layerwise_reload(model)
    load: Any = model.load_weights
    loaded: set[str] | None = load(iter(weights.items()))
    finalize_layerwise_reload(model, config)
    _process_tied_layers(model)
    # As in vLLM's first load, models that do not report what they have loaded, and quantized ones, are not checked.
    if loaded is not None and config.quantization is None:
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        if missing := sorted(names - loaded):
            problem = f"the published weights have no values for {', '.join(missing[:3])} of vLLM's model"
            raise RolloutError(f"{problem}: publish the model that the engine was started with (without buffers)")


def _forget_packed_experts(model: nn.Module) -> None:
    """Let experts on CPU be repacked by the next load.

    vLLM does so only if an expert layer has no kernel yet. On GPUs it updates the kernel's weights in place.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        devices = {parameter.device.type for parameter in layer.parameters()}
        if hasattr(method, "moe_kernel") and devices == {"cpu"}:
            method.moe_kernel = None


def _process_tied_layers(model: nn.Module) -> None:
    """Let layers whose weight is that of another layer, such as a head, make their own copies of it again.

    On CPU, a layer computes with a repacked copy. vLLM makes that of the layer that owns the weight, and only that.
    """
    owners: dict[int, nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.device.type != "cpu" or owners.setdefault(id(weight), layer) is layer:
            continue
        method: Any = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
