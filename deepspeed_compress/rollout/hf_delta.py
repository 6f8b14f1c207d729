"""Directories of versions for SGLang's /pull_weights: whole checkpoints, and changes between them.

The layout is slime's (THUDM/slime at 624b824a8: `docs/en/advanced/delta-weight-sync.md`, `slime/utils/disk_delta.py`,
`slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py`, and the reader in
`docker/patch/latest/sglang-pull_weights.patch`). A directory `weight_v000012` has one of two contents:

- A full version is a checkpoint of Hugging Face. Those written here list the checksums of their tensors in the index.
- A delta has an index whose metadata says so, and for each changed tensor a zstandard frame with the change of its
  bytes since the version before. Checksums of the new bytes are in the header of the same file.

Version 0 is the checkpoint that the engine was started with.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, StringConstraints
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspeed_compress.errors import ConfigError, RolloutError
from deepspeed_compress.safe_files import check_regular, read_text, replacing, temporary, write_json

Encoding = Literal["xor", "overwrite"]
"""Change of a tensor: the xor of its bytes, or the positions of changed bytes and their new values."""
Checksum = Literal["xxh3-128", "adler32"]

_INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"weight_v(\d{6,})")
_ZSTD_LEVEL = 1
_LARGEST_POSITION = (1 << 32) - 1
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/]+\.safetensors$")]
"""Name of a file of weights. It is in the directory of its index: a path could lead to any file of the host."""

Bytes = NDArray[np.uint8]


class _Metadata(BaseModel):
    """Metadata of a checkpoint or a delta.

    Attributes:
        version: number of the version of a delta.
        base_version: number of the version that a delta changes.
        delta_encoding: kind of the changes of a delta.
        compression_format: compression of a delta.
        checksum_format: kind of checksums.
        checksums: checksums of the tensors of a full version. Checkpoints of other writers have none.
        total_size: bytes of the tensors of a full version.
    """

    version: str | None = None
    base_version: str | None = None
    delta_encoding: Encoding | None = None
    compression_format: Literal["zstd"] | None = None
    checksum_format: Checksum | None = None
    checksums: Mapping[str, str] = {}
    total_size: int = 0

    @property
    def is_delta(self) -> bool:
        """Return True for a delta, also if one of its keys is damaged."""
        return self.delta_encoding is not None or self.base_version is not None


class _Index(BaseModel):
    """Index of a checkpoint: a file for each tensor. It is empty if the checkpoint has none."""

    # A delta without its metadata would pass for a full version.
    model_config = ConfigDict(extra="forbid")

    metadata: _Metadata = _Metadata()
    weight_map: Mapping[str, _FileName] = {}


def version_directory(directory: Path, version: int) -> Path:
    """Return the place of a version."""
    return directory / f"weight_v{version:06d}"


def find_directories(directory: Path) -> list[int]:
    """Return the versions in a directory, in ascending order."""
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))


def read_version(directory: Path, version: int | None = None, base: Path | None = None) -> dict[str, Tensor]:
    """Return all tensors of a version, whose checksums are verified, by their names in a checkpoint.

    Read the newest full version up to it, and apply the deltas after that in order.

    Args:
        directory: the directory of all versions.
        version: number of the version; None for the newest one.
        base: the checkpoint that version 1 changes, if that is a delta.

    Raises:
        RolloutError: a version is missing, or a file or a tensor differs from what was written.
    """
    target = max(find_directories(directory), default=0) if version is None else version
    start, deltas = target, list[tuple[Path, _Index]]()
    while start:
        place = version_directory(directory, start)
        if not place.is_dir():
            raise RolloutError(f"version {target} cannot be read: {place} is missing")
        index = _read_index(place)
        if not index.metadata.is_delta:
            break
        deltas.append((place, index))
        start -= 1
    if not start and base is None:
        raise RolloutError(f"version {target} changes the checkpoint that the engine was started with: pass base")
    tensors, _ = read_checkpoint(version_directory(directory, start) if start or base is None else base)
    for number, (place, index) in enumerate(reversed(deltas), start + 1):
        _apply_delta(tensors, place, index, number)
    return tensors


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a checkpoint, mapped from its files, and the name of the file of each.

    They are verified if the index has checksums.

    Raises:
        RolloutError: there are no weights, or a file is missing or damaged.
    """
    index, tensors, files = _read_index(checkpoint), dict[str, Tensor](), dict[str, str]()
    names = {*index.weight_map.values()} or {file.name for file in checkpoint.glob("*.safetensors")}
    for name in sorted(names):
        with _reading(checkpoint / name):
            check_regular(str(checkpoint / name))
            tensors |= (loaded := load_file(checkpoint / name))
        files |= dict.fromkeys(loaded, name)
    if not tensors:
        raise RolloutError(f"{checkpoint} has no weights in the safetensors format")
    for name in {**index.weight_map, **index.metadata.checksums}:
        if name not in tensors:
            raise RolloutError(f'{checkpoint} is damaged: "{name}" is missing')
    for name, expected in index.metadata.checksums.items():
        _verify(checkpoint / files[name], name, tensors[name], index.metadata.checksum_format, expected)
    return tensors, files


def _apply_delta(tensors: dict[str, Tensor], place: Path, index: _Index, version: int) -> None:
    """Bring `tensors` from the version before to `version`.

    Raises:
        RolloutError: the delta is damaged, or leads from another version.
    """
    metadata = index.metadata
    if (metadata.version, metadata.base_version) != (f"{version:06d}", f"{version - 1:06d}"):
        raise RolloutError(f"{place} leads from version {metadata.base_version} to version {metadata.version}")
    for name, file in index.weight_map.items():
        with _reading(place / file):
            check_regular(str(place / file))
            old = tensors[name]
            with safe_open(place / file, "pt") as opened:
                payload, expected = opened.get_tensor(name).numpy().tobytes(), (opened.metadata() or {})[name]
            values = _change(_bytes(old), payload, metadata.delta_encoding)
            tensors[name] = torch.from_numpy(values).view(old.dtype).view(old.shape)
        _verify(place / file, name, tensors[name], metadata.checksum_format, expected)


def _change(old: Bytes, payload: bytes, encoding: Encoding | None) -> Bytes:
    """Return the new bytes of a tensor.

    Raises:
        ValueError: the change has another size than the tensor.
    """
    size = zstandard.frame_content_size(payload)
    if size != old.size if encoding == "xor" else not 0 <= size <= 4 + 5 * old.size:
        raise ValueError(f"the change of a tensor of {old.size} bytes has {size} bytes")
    change = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    if encoding == "xor":
        return old ^ change
    end = 4 + 4 * int.from_bytes(change[:4].tobytes(), "little")
    new = old.copy()
    new[change[4:end].view("<u4")] = change[end:]
    return new


def _verify(file: Path, name: str, values: Tensor, checksum: Checksum | None, expected: str) -> None:
    if _compute_checksum(values, checksum) != expected:
        raise RolloutError(f'{file} is damaged: "{name}" has another checksum')


def write_full(place: Path, weights: Mapping[str, Tensor], files: Mapping[str, str], checksum: Checksum) -> None:
    """Write a full version to an existing directory.

    Args:
        place: the directory.
        weights: all tensors, on the CPU, contiguous, and none in the memory of another.
        files: the names of their files.
        checksum: the kind of checksums.
    """
    for file in sorted({*files.values()}):
        _save(place / file, {name: weights[name] for name in weights if files[name] == file}, {"format": "pt"})
    size, checksums = sum(one.nbytes for one in weights.values()), _compute_checksums(weights, checksum)
    metadata = _Metadata(checksum_format=checksum, checksums=checksums, total_size=size)
    write_json(place / _INDEX, _Index(metadata=metadata, weight_map=files).model_dump(exclude_unset=True))


def write_delta(
    place: Path,
    version: int,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    encoding: Encoding,
    checksum: Checksum,
) -> list[str]:
    """Write a version to an existing directory, as changes of the version before.

    Args:
        place: the directory.
        version: number of the version.
        old: tensors of the version before.
        new: tensors of the version, with the shapes and types of `old`.
        encoding: the kind of changes.
        checksum: the kind of checksums.

    Returns:
        The names of the changed tensors.
    """
    with ThreadPoolExecutor() as pool:
        payloads = pool.map(_encode, map(old.__getitem__, new), new.values(), repeat(encoding))
        changes = {name: payload for name, payload in zip(new, payloads, strict=True) if payload is not None}
    file = "model-00000-of-00001.safetensors"
    if changes:
        _save(place / file, changes, _compute_checksums({name: new[name] for name in changes}, checksum))
    metadata = _Metadata(
        version=f"{version:06d}",
        base_version=f"{version - 1:06d}",
        delta_encoding=encoding,
        compression_format="zstd",
        checksum_format=checksum,
    )
    index = _Index(metadata=metadata, weight_map=dict.fromkeys(changes, file))
    write_json(place / _INDEX, index.model_dump(exclude_unset=True))
    return list(changes)


def _encode(old: Tensor, new: Tensor, encoding: Encoding) -> Tensor | None:
    """Return the compressed change of a tensor; None if there is none.

    Raises:
        ConfigError: the tensor is too large for the encoding.
    """
    before, after = _bytes(old), _bytes(new)
    change = before ^ after
    if not change.any():
        return None
    if encoding == "overwrite":
        if after.size > _LARGEST_POSITION:
            raise ConfigError(f'encoding "overwrite": a tensor has {after.size} bytes (allowed: 2**32 - 1); use "xor"')
        positions = np.flatnonzero(change).astype("<u4")
        count = np.array([positions.size], "<u4")
        change = np.concatenate([count.view(np.uint8), positions.view(np.uint8), after[positions]])
    payload = zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(change.data)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _compute_checksums(tensors: Mapping[str, Tensor], checksum: Checksum) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(_compute_checksum, tensors.values(), repeat(checksum)), strict=True))


def _compute_checksum(tensor: Tensor, checksum: Checksum | None) -> str:
    """Return the checksum of a tensor's bytes as hexadecimal digits."""
    if checksum == "adler32":
        return f"{zlib.adler32(_bytes(tensor).data):08x}"
    import xxhash

    return xxhash.xxh3_128_hexdigest(_bytes(tensor).data)


def _bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the CPU, in its memory if it is contiguous."""
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _read_index(place: Path) -> _Index:
    file = place / _INDEX
    if not file.exists():
        return _Index()
    with _reading(file):
        return _Index.model_validate_json(read_text(file))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in all errors that damage can cause.

    Raises:
        RolloutError: it is missing or damaged.
    """
    try:
        yield
    except FileNotFoundError:
        raise RolloutError(f"{file} is missing") from None
    except (ConfigError, IndexError, KeyError, OSError, SafetensorError, ValueError, zstandard.ZstdError) as error:
        raise RolloutError(f"{file} is damaged: {error}") from error


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file, which is on disk at the end."""
    scratch = temporary(file)
    with replacing(file, scratch):
        save_file(tensors, scratch, metadata)
