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
    Checksum,
    Encoding,
    find_directories,
    read_checkpoint,
    read_version,
    version_directory,
    write_delta,
    write_full,
)
from deepspeed_compress.rollout.holder import make_module
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Manifest, find_versions, read_manifest
from deepspeed_compress.safe_files import completing, locked

_COPIED = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
"""Endings of files of a checkpoint that an engine needs next to the weights."""


class CheckpointExporter:
    """Follower of a store that writes each version as a directory `weight_v000012`, with the names of a checkpoint.

    A version is full if it has a full copy in the store, or if the version before was not written; others contain
    changes. What the store has deleted is deleted here too. One process, on any host, does this for all ranks. It holds
    two copies of the model in host memory, and for a moment a third one of packed experts.

    Args:
        store: the store that is published to.
        directory: directory for the versions, which the hosts of engines share.
        model: directory of the checkpoint that the engines were started with. Full versions get its other files, its
            distribution of tensors over files, and its tensors that are not published.
        encoding: kind of changes.
        checksum: kind of checksums.

    Raises:
        RolloutError: what is in one of the directories is damaged.
        UnsupportedError: the checkpoint is quantized.

    Attributes:
        version: number of the newest written version; 0 before the first one.

    Examples:
        >>> exporter = CheckpointExporter(DirectoryStore("/shared/policy"), Path("/shared/hf"), Path("/models/base"))
        >>> exporter.update()
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        model: Path,
        encoding: Encoding = "xor",
        checksum: Checksum = "xxh3-128",
    ) -> None:
        self._store, self._directory, self._model = store, directory, model
        self._encoding, self._checksum = encoding, checksum
        self._names = CheckpointNames(_read_config(model))
        self._weights, self._files = read_checkpoint(model)
        directory.mkdir(parents=True, exist_ok=True)
        self.version = max(find_directories(directory), default=0)
        if self.version:
            self._weights = read_version(directory, base=model)
        self._manifest: Manifest | None = None

    def update(self) -> list[int]:
        """Write the versions that are new in the store, or only the newest one if those before it are gone.

        Returns:
            The numbers of the written versions.

        Raises:
            RolloutError: a version cannot be reached, the store has older versions than the directory, or another
                process has written to that.
            OSError: the store cannot be read, or the directory cannot be written.
        """
        with locked(self._directory):
            versions, newest = find_versions(self._store), max(find_directories(self._directory), default=0)
            if newest != self.version:
                raise RolloutError(f"another process has written version {newest} to {self._directory}: end it")
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
            for version in find_directories(self._directory):
                if versions and version < min(versions[0], self.version):
                    shutil.rmtree(version_directory(self._directory, version))
            return new

    def _write(self, version: int) -> None:
        is_full, weights = self._receive(version)
        changed: Sequence[str] = ()
        with completing(version_directory(self._directory, version)) as scratch:
            if is_full or version != self.version + 1:
                self._keep(weights, weights)
                files = {name: self._files.get(name, max(self._files.values())) for name in self._weights}
                _copy_others(self._model, scratch)
                write_full(scratch, self._weights, files, self._checksum)
            else:
                changed = write_delta(scratch, version, self._weights, weights, self._encoding, self._checksum)
        # Until now, a version that cannot be written is tried again as a change of the one before.
        self._keep(weights, changed)
        self.version = version

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
