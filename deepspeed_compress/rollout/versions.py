"""Versions in a store: manifests, which versions a receiver needs, and the chain that a publisher extends.

A version is a set of parts and a manifest. The manifest is written last, so a version whose manifest can be read is
complete. It lists the parts with the changes since the version before, and for a full copy also those with all values.
One publisher at a time extends the chain of versions.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.adapters import AdapterConfig
from deepspeed_compress.rollout.parts import Digest, PartEntry, Record, Size, SliceDigest
from deepspeed_compress.rollout.store import Store

Dtype = Literal["bf16", "fp16", "fp32"]
"""Data type of published weights."""

_MANIFEST, _FULL, _CHANGES = "manifest", "full", "changes"
_PUBLISHER_DIGITS = 9
"""Digits of the name of a publisher in the names of its parts."""
_DIGITS = 12
"""Digits of a version in the names of its blobs."""
_OF_VERSION = re.compile(rf"(\d{{{_DIGITS}}})\.")
_FINISHED = re.compile(rf"(\d{{{_DIGITS}}})\.({_MANIFEST}|{_FULL}|{_CHANGES})[\d.]*")


class Changes(Record):
    """Parts that lead from the version `base`, whose model has the digest `base_digest`, to this one."""

    base: Size
    base_digest: Digest
    parts: tuple[PartEntry, ...]


class Manifest(Record):
    """Content of a version.

    Attributes:
        version: number of the version. Numbers grow, and are never used again.
        dtype: data type of all tensors.
        tensors: shapes by name.
        digest: digest of the whole model (see `model_digest`).
        changes: the changes since the version before; None if that one is not known to the publisher.
        full: parts with all values; None in most versions.
        adapter: settings of the adapter that the tensors are; None if they are weights.
    """

    version: Size
    dtype: Dtype
    tensors: Mapping[str, tuple[Size, ...]]
    digest: Digest
    changes: Changes | None
    full: tuple[PartEntry, ...] | None
    adapter: AdapterConfig | None = None


def model_digest(slices: Iterable[SliceDigest]) -> str:
    """Return the digest of a whole model: the SHA-256 over the digests of its slices, in the order of names."""
    return hashlib.sha256("".join(map(_line, sorted(slices))).encode()).hexdigest()


def _line(one: SliceDigest) -> str:
    rows = f"\0{one.rows}\0{one.stride}" if one.rows > 1 else ""
    return f"{one.name}\0{one.start}\0{one.numel}\0{one.digest}{rows}\n"


def part_stem(version: int, full: bool, rank: int, publisher: str) -> str:
    """Return the beginning of the names of a rank's parts. No publisher replaces parts of another one."""
    return f"{_prefix(version)}{_FULL if full else _CHANGES}.{rank:05d}.{publisher}"


def _prefix(version: int) -> str:
    """Return the beginning of the names of all blobs of a version. Names sort like versions."""
    return f"{version:0{_DIGITS}d}."


def find_versions(store: Store) -> list[int]:
    """Return the complete versions in a store, in ascending order."""
    return sorted(_versions_with(_MANIFEST, store.names()))


def find_full_copies(store: Store) -> list[int]:
    """Return the complete versions with a full copy, in ascending order."""
    names = store.names()
    return sorted(_versions_with(_MANIFEST, names) & _versions_with(_FULL, names))


def _versions_with(kind: str, names: Iterable[str]) -> set[int]:
    found = (_FINISHED.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match is not None and match[2] == kind}


def read_manifest(store: Store, version: int) -> Manifest:
    """Return the manifest of a version.

    Raises:
        RolloutError: it was deleted, or is malformed.
    """
    try:
        manifest = Manifest.model_validate_json(store.get(_prefix(version) + _MANIFEST))
    except KeyError:
        raise RolloutError(f"version {version} is no longer in the store") from None
    except ValidationError as error:
        raise RolloutError(f"the manifest of version {version} is malformed: {error}") from error
    if manifest.version != version or (manifest.changes is not None and manifest.changes.base != version - 1):
        raise RolloutError(f"the manifest of version {version} is malformed: it belongs to another version")
    return manifest


@dataclass(frozen=True)
class Chain:
    """End of the chain of versions in a store.

    Attributes:
        version: the newest version; 0 in an empty store.
        digest: its model digest; empty if no change may be based on it.
        full: the newest version with a full copy.
        publisher: digits that no other publisher has.
    """

    version: int
    digest: str
    full: int
    publisher: str


def take_over(store: Store, dtype: Dtype) -> Chain:
    """Take over a store, delete what a killed publisher left behind the end of its chain, and return that end."""
    newest = max(find_versions(store), default=0)
    _delete(store, range(newest + 1, 10**_DIGITS))
    full, digest = max(find_full_copies(store), default=0), ""
    # A damaged manifest proves nothing, and no change leads to the bits of another type.
    with suppress(RolloutError):
        manifest = read_manifest(store, newest)
        digest = manifest.digest if manifest.dtype == dtype else ""
    return Chain(newest, digest, full, f"{secrets.randbelow(10**_PUBLISHER_DIGITS):0{_PUBLISHER_DIGITS}d}")


def extend_chain(store: Store, chain: Chain, manifest: Manifest, keep_full: int) -> int:
    """Complete the version of `manifest`, and delete everything before the oldest of `keep_full` full copies.

    Returns:
        The bytes of the manifest.

    Raises:
        RolloutError: another publisher has written to the store since `chain` was read.
    """
    newest = max(find_versions(store), default=0)
    if newest > chain.version:
        raise RolloutError(f"another publisher has written version {newest} to the same store; end it or use another")
    data = manifest.model_dump_json().encode()
    store.put(_prefix(manifest.version) + _MANIFEST, data)
    full = find_full_copies(store)
    if len(full) >= keep_full:
        _delete(store, range(full[-keep_full]))
    return len(data)


def _delete(store: Store, versions: range) -> None:
    for name in store.names():
        found = _OF_VERSION.match(name)
        if found is not None and int(found[1]) in versions:
            store.delete(name)
