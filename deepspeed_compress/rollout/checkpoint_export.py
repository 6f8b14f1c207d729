"""Export of published versions to directories for SGLang's /pull_weights: whole checkpoints, and changes between them.

The layout is slime's (THUDM/slime at 624b824a8: `docs/en/advanced/delta-weight-sync.md`, `slime/utils/disk_delta.py`,
`slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py`, and the reader in
`docker/patch/latest/sglang-pull_weights.patch`). A directory `weight_v000012` has one of two contents:

- A full version is a checkpoint of Hugging Face. Those written here list the checksums of their tensors in the index.
- A delta has an index whose metadata says so, and for each changed tensor a zstandard frame with the xor of its bytes
  and those of the version before. Checksums of the new bytes are in the header of the same file.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout.checkpoint_names import CheckpointNames
from deepspeed_compress.rollout.module_weights import make_module
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Manifest, find_versions, read_manifest
from deepspeed_compress.safe_files import completing, locked, read_text, replacing, temporary, write_json

_COPIED = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
"""Endings of files of a checkpoint that an engine needs next to the weights."""
_INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"weight_v(\d{6,})")
_ZSTD_LEVEL = 1
_CHECKSUM = "xxh3-128"
"""Kind of checksums."""

Bytes = NDArray[np.uint8]


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
                problem = f"{self._directory} has version {newest}, but the store ends at {versions[-1]}"
                raise RolloutError(f"{problem}: use the directory with one store only")
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


def version_directory(directory: Path, version: int) -> Path:
    """Return the place of a version."""
    return directory / f"weight_v{version:06d}"


def find_directories(directory: Path) -> list[int]:
    """Return the versions in a directory, in ascending order."""
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a checkpoint, mapped from its files, and the name of the file of each.

    Raises:
        RolloutError: there are no weights.
    """
    index, tensors, files = checkpoint / _INDEX, dict[str, Tensor](), dict[str, str]()
    indexed = json.loads(read_text(index))["weight_map"].values() if index.exists() else ()
    for name in sorted({*indexed} or {file.name for file in checkpoint.glob("*.safetensors")}):
        tensors |= (loaded := load_file(checkpoint / name))
        files |= dict.fromkeys(loaded, name)
    if not tensors:
        raise RolloutError(f"{checkpoint} has no weights in the safetensors format")
    return tensors, files


def write_full(place: Path, weights: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Write a full version to an existing directory.

    Args:
        place: the directory.
        weights: all tensors, on the CPU, contiguous, and none in the memory of another.
        files: the names of their files.
    """
    for file in sorted({*files.values()}):
        _save(place / file, {name: weights[name] for name in weights if files[name] == file}, {"format": "pt"})
    size = sum(one.nbytes for one in weights.values())
    metadata = {"checksum_format": _CHECKSUM, "checksums": _compute_checksums(weights), "total_size": size}
    write_json(place / _INDEX, {"metadata": metadata, "weight_map": files})


def write_delta(place: Path, version: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[str]:
    """Write a version to an existing directory, as changes of the version before.

    Args:
        place: the directory.
        version: number of the version.
        old: tensors of the version before.
        new: tensors of the version, with the shapes and types of `old`.

    Returns:
        The names of the changed tensors.
    """
    with ThreadPoolExecutor() as pool:
        payloads = pool.map(_encode, map(old.__getitem__, new), new.values())
        changes = {name: payload for name, payload in zip(new, payloads, strict=True) if payload is not None}
    file = "model-00000-of-00001.safetensors"
    if changes:
        _save(place / file, changes, _compute_checksums({name: new[name] for name in changes}))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": _CHECKSUM,
    }
    write_json(place / _INDEX, {"metadata": metadata, "weight_map": dict.fromkeys(changes, file)})
    return list(changes)


def _encode(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the compressed change of a tensor; None if there is none."""
    change = _bytes(old) ^ _bytes(new)
    if not change.any():
        return None
    payload = zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(change.data)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _compute_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of the bytes of each tensor as hexadecimal digits."""
    import xxhash

    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda tensor: xxhash.xxh3_128_hexdigest(_bytes(tensor).data), tensors.values())
        return dict(zip(tensors, found, strict=True))


def _bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the CPU, in its memory if it is contiguous."""
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file, which is on disk at the end."""
    scratch = temporary(file)
    with replacing(file, scratch):
        save_file(tensors, scratch, metadata)
