"""Export of published versions to the directories that SGLang's /pull_weights reads (see `hf_delta`)."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout.checkpoint_names import CheckpointNames
from deepspeed_compress.rollout.hf_delta import (
    find_directories,
    read_checkpoint,
    version_directory,
    write_delta,
    write_full,
)
from deepspeed_compress.rollout.module_weights import make_module
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Manifest, find_versions, read_manifest
from deepspeed_compress.safe_files import completing, locked

_COPIED = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
"""Endings of files of a checkpoint that an engine needs next to the weights."""


class CheckpointExporter:
    """Follower of a store that writes each version as a directory `weight_v000012`, with the names of a checkpoint.

    A version is full if it has a full copy in the store, or if this process has not written the version before; others
    contain changes. What the store has deleted is deleted here too. One process, on any host, does this for all ranks.
    It holds two copies of the model in host memory, and for a moment a third one of packed experts.

    Args:
        store: the store that is published to.
        directory: directory for the versions, which the hosts of engines share.
        model: directory of the checkpoint that the engines were started with. Full versions get its other files, its
            distribution of tensors over files, and its tensors that are not published.

    Raises:
        RolloutError: the checkpoint has no weights.
        UnsupportedError: the checkpoint is quantized.

    Examples:
        >>> exporter = CheckpointExporter(DirectoryStore("/shared/policy"), Path("/shared/hf"), Path("/models/base"))
        >>> exporter.update()
    """

    def __init__(self, store: Store, directory: Path, model: Path) -> None:
        self._store, self._directory, self._model = store, directory, model
        self._names = CheckpointNames(_read_config(model))
        self._weights, self._files = read_checkpoint(model)
        directory.mkdir(parents=True, exist_ok=True)
        self._written = 0
        """Number of the last version that this process has written, of which it holds the weights."""
        self._manifest: Manifest | None = None

    def update(self) -> list[int]:
        """Write the versions that are new in the store, or only the newest one if those before it are gone.

        Returns:
            The numbers of the written versions.

        Raises:
            RolloutError: a version cannot be reached, or the store has older versions than the directory.
            OSError: the store cannot be read, or the directory cannot be written.
        """
        with locked(self._directory):
            versions, newest = find_versions(self._store), max(find_directories(self._directory), default=0)
            if versions and versions[-1] < newest:
                raise RolloutError(
                    f"{self._directory} has version {newest}, but the store ends at {versions[-1]}: use the directory "
                    "with one store only"
                )
            new = [version for version in versions if version > newest]
            if new and new[0] != newest + 1:
                new = new[-1:]
            for version in new:
                self._write(version)
            for version in find_directories(self._directory)[:-1]:
                if versions and version < versions[0]:
                    shutil.rmtree(version_directory(self._directory, version))
            return new

    def _write(self, version: int) -> None:
        is_full, weights = self._receive(version)
        changed: Sequence[str] = ()
        with completing(version_directory(self._directory, version)) as scratch:
            if is_full or version != self._written + 1:
                self._keep(weights, weights)
                files = {name: self._files.get(name, max(self._files.values())) for name in self._weights}
                _copy_others(self._model, scratch)
                write_full(scratch, self._weights, files)
            else:
                changed = write_delta(scratch, version, self._weights, weights)
        # Until now, a version that cannot be written is tried again as a change of the one before.
        self._keep(weights, changed)
        self._written = version

    def _receive(self, version: int) -> tuple[bool, Mapping[str, Tensor]]:
        """Return if the store has a full copy of a version, and its weights under the names of a checkpoint."""
        manifest, last = read_manifest(self._store, version), self._manifest
        if last is None or (last.tensors, last.dtype) != (manifest.tensors, manifest.dtype):
            self._module: nn.Module = make_module(manifest.tensors, manifest.dtype)
            self._receiver = Receiver(self._module, self._store)
        self._manifest = manifest
        self._receiver.update(version)
        weights = dict(self._module.named_parameters())
        return manifest.full is not None, self._names.convert(self._names.tie(weights, self._files))

    def _keep(self, weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
        for name in names:
            self._weights[name] = weights[name].detach().clone(memory_format=torch.contiguous_format)


def _read_config(model: Path) -> Any:
    """Return the configuration of transformers in a checkpoint; None if it has none.

    Raises:
        UnsupportedError: the checkpoint is quantized.
    """
    from transformers import AutoConfig

    if not (model / "config.json").exists():
        return None
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(f"{model} is quantized, but bf16, fp16 or fp32 weights are published: use the original")
    return config


def _copy_others(model: Path, place: Path) -> None:
    """Copy the files of a checkpoint that an engine needs next to the weights."""
    for file in model.iterdir():
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(".index.json"):
            shutil.copy(file, place)
