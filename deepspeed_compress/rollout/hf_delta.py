"""Directories of versions for SGLang's /pull_weights: whole checkpoints, and changes between them.

The layout is slime's (THUDM/slime at 624b824a8: `docs/en/advanced/delta-weight-sync.md`, `slime/utils/disk_delta.py`,
`slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py`, and the reader in
`docker/patch/latest/sglang-pull_weights.patch`). A directory `weight_v000012` has one of two contents:

- A full version is a checkpoint of Hugging Face. Those written here list the checksums of their tensors in the index.
- A delta has an index whose metadata says so, and for each changed tensor a zstandard frame with the xor of its bytes
  and those of the version before. Checksums of the new bytes are in the header of the same file.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.safe_files import read_text, replacing, temporary, write_json

_INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"weight_v(\d{6,})")
_ZSTD_LEVEL = 1
_CHECKSUM = "xxh3-128"
"""Kind of checksums."""

Bytes = NDArray[np.uint8]


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
    _write_index(place, metadata, files)


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
    _write_index(place, metadata, dict.fromkeys(changes, file))
    return list(changes)


def _encode(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the compressed change of a tensor; None if there is none."""
    change = _bytes(old) ^ _bytes(new)
    if not change.any():
        return None
    payload = zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(change.data)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _compute_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(_compute_checksum, tensors.values()), strict=True))


def _compute_checksum(tensor: Tensor) -> str:
    """Return the checksum of a tensor's bytes as hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(_bytes(tensor).data)


def _bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the CPU, in its memory if it is contiguous."""
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _write_index(place: Path, metadata: Mapping[str, Any], files: Mapping[str, str]) -> None:
    write_json(place / _INDEX, {"metadata": metadata, "weight_map": files})


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file, which is on disk at the end."""
    scratch = temporary(file)
    with replacing(file, scratch):
        save_file(tensors, scratch, metadata)
