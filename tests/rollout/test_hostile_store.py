"""A receiver of a store that somebody else has written to raises its own error, ends, and reads no huge file."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.store import LARGEST

MANIFEST = "{:012d}.manifest"


def published(path: Path, versions: int = 1) -> DirectoryStore:
    """Return a store with versions of a small model."""
    store, model = DirectoryStore(path), nn.Linear(3, 3)
    publisher = Publisher(model, store)
    for _ in range(versions):
        publisher.publish()
        with torch.no_grad():
            model.weight += 1
    return store


def rewrite(store: DirectoryStore, version: int, change: Callable[[dict[str, Any]], object], name: str = "") -> None:
    """Change the manifest of a version, and store it as `name`."""
    manifest = json.loads(store.get(MANIFEST.format(version)))
    change(manifest)
    store.put(name or MANIFEST.format(version), json.dumps(manifest).encode())


def part_of(store: DirectoryStore) -> str:
    """Return the name of the part of the first version."""
    [name] = [name for name in store.names() if name.startswith("000000000001.full.")]
    return name


def check_refused(store: DirectoryStore, message: str) -> None:
    receiver = Receiver(nn.Linear(3, 3, dtype=torch.bfloat16), store)
    with pytest.raises(RolloutError, match=message):
        receiver.update()
    assert receiver.version is None


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    store = published(tmp_path)
    rewrite(store, 1, lambda manifest: None, MANIFEST.format(7))
    check_refused(store, "the manifest of version 7 is malformed: it belongs to another version")


@pytest.mark.parametrize("base", [1, 2, 3])
def test_a_version_that_builds_on_itself_or_a_later_one_ends_no_receiver(base: int, tmp_path: Path) -> None:
    """Whoever writes such manifests would let receivers walk back forever."""
    store = published(tmp_path, 2)
    digest = json.loads(store.get(MANIFEST.format(2)))["digest"]

    def change(manifest: dict[str, Any]) -> None:
        manifest["changes"] |= {"base": base, "base_digest": digest}

    rewrite(store, 2, change)
    check_refused(store, "no full copy leads to it" if base == 1 else "it belongs to another version")


def replace_part(store: DirectoryStore, data: bytes) -> None:
    """Replace the part of the first version by `data`, with its digest in the manifest."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["full"][0] |= {"size": len(data), "digest": hashlib.sha256(data).hexdigest()}

    store.put(part_of(store), data)
    rewrite(store, 1, change)


def replace_index(store: DirectoryStore, index: bytes) -> None:
    data = store.get(part_of(store))
    [length] = struct.unpack_from("<I", data)
    replace_part(store, struct.pack("<I", len(index)) + index + data[4 + length :])


@pytest.mark.parametrize(
    "fields",
    [
        {"numel": "many"},
        {"start": None},
        {"start": 0.5},
        {"start": -1},
        {"rows": 0},
        {"rows": -1},
        {"rows": [2]},
        {"bytes": -5},
        {"digest": 5},
        {"name": {}},
        {"other": 1},
    ],
    ids=str,
)
def test_a_malformed_entry_of_an_index_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    store = published(tmp_path)
    data = store.get(part_of(store))
    [length] = struct.unpack_from("<I", data)
    index = json.loads(data[4 : 4 + length])
    replace_index(store, json.dumps([index[0] | fields, *index[1:]]).encode())
    check_refused(store, "the index of a part is malformed")


@pytest.mark.parametrize("index", [b"[" * 100_000, b"{}", b"[[]]", b"null", b"\xff", b""], ids=range(6))
def test_an_index_that_is_none_is_refused(index: bytes, tmp_path: Path) -> None:
    store = published(tmp_path)
    replace_index(store, index)
    check_refused(store, "the index of a part is malformed")


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 4, b"\xff" * 40], ids=len)
def test_a_part_without_an_index_is_refused(data: bytes, tmp_path: Path) -> None:
    store = published(tmp_path)
    replace_part(store, data)
    check_refused(store, "the index of a part is malformed")


@pytest.mark.parametrize("find_name", [part_of, lambda store: MANIFEST.format(1)], ids=["part", "manifest"])
def test_a_file_that_is_too_large_is_not_read(find_name: Callable[[DirectoryStore], str], tmp_path: Path) -> None:
    store = published(tmp_path)
    name = find_name(store)
    os.truncate(tmp_path / name, LARGEST + 1)
    check_refused(store, f"{name} has {LARGEST + 1} bytes")
