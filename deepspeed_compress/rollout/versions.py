"""Versions in a store: manifests, and which versions a receiver needs.

A version is a set of parts and a manifest. The manifest is written last, so a version whose manifest can be read is
complete. It lists the parts with the changes since the version before, and for a full copy also those with all values.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import ValidationError

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.adapters import AdapterConfig
from deepspeed_compress.rollout.parts import Digest, PartEntry, Record, Size, SliceDigest
from deepspeed_compress.rollout.store import Store

Dtype = Literal["bf16", "fp16", "fp32"]
"""Data type of published weights."""

_MANIFEST, _FULL, _CHANGES = "manifest", "full", "changes"
_CLAIM = "publisher"
"""Blob with the claim of the publisher that has started last."""
_CLAIM_DIGITS = 9
_DIGITS = 12
"""Digits of a version in the names of its blobs."""
_OF_VERSION = re.compile(rf"(\d{{{_DIGITS}}})\.")
_FINISHED = re.compile(rf"(\d{{{_DIGITS}}})\.({_MANIFEST}|{_FULL}|{_CHANGES})[\d.]*")


class Changes(Record):
    """Parts that lead from the version `base`, whose model has the digest `base_digest`, to this one."""

    base: Size
    base_digest: Digest
    parts: tuple[PartEntry, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


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

    @property
    def full_size(self) -> int:
        return sum(part.size for part in self.full or ())


def model_digest(slices: Iterable[SliceDigest]) -> str:
    """Return the digest of a whole model: the SHA-256 over the digests of its slices, in the order of names."""
    return hashlib.sha256("".join(map(_line, sorted(slices))).encode()).hexdigest()


def _line(one: SliceDigest) -> str:
    rows = f"\0{one.rows}\0{one.stride}" if one.rows > 1 else ""
    return f"{one.name}\0{one.start}\0{one.numel}\0{one.digest}{rows}\n"


def claim_store(store: Store) -> str:
    """Take over a store from all other publishers. Return the claim: digits that no other publisher has."""
    claim = f"{secrets.randbelow(10**_CLAIM_DIGITS):0{_CLAIM_DIGITS}d}"
    store.put(_CLAIM, claim.encode())
    return claim


def holds_claim(store: Store, claim: str) -> bool:
    """Return True unless another publisher has taken over the store since `claim`."""
    try:
        return store.get(_CLAIM) == claim.encode()
    except KeyError:
        return False


def part_stem(version: int, full: bool, rank: int, claim: str) -> str:
    """Return the beginning of the names of a rank's parts. No publisher replaces parts of another claim."""
    return f"{_prefix(version)}{_FULL if full else _CHANGES}.{rank:05d}.{claim}"


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


def write_manifest(store: Store, manifest: Manifest) -> int:
    """Complete a version. Return the bytes of its manifest."""
    data = manifest.model_dump_json().encode()
    store.put(_prefix(manifest.version) + _MANIFEST, data)
    return len(data)


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


def delete_old_versions(store: Store, keep: int) -> None:
    """Delete everything before the oldest of the newest `keep` full copies."""
    full = find_full_copies(store)
    if len(full) >= keep:
        _delete(store, range(full[-keep]))


def delete_unfinished(store: Store, newest: int) -> None:
    """Delete what a killed publisher has left after the `newest` complete version, and what it left of a claim."""
    _delete(store, range(newest + 1, 10**_DIGITS))
    for name in store.names():
        if name.startswith(f"{_CLAIM}."):
            store.delete(name)


def _delete(store: Store, versions: range) -> None:
    for name in store.names():
        found = _OF_VERSION.match(name)
        if found is not None and int(found[1]) in versions:
            store.delete(name)
