"""Shares of a version: what each rank writes, and the manifest that the first rank makes of it."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.rollout.adapters import AdapterConfig
from deepspeed_compress.rollout.changes import encode, encode_lossy
from deepspeed_compress.rollout.parts import EncodedSlice, PartEntry, PartWriter, SliceDigest, values_digest
from deepspeed_compress.rollout.slices import Slice
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Chain, Changes, Dtype, Manifest, model_digest, part_stem


@dataclass(frozen=True)
class Share:
    """Part of a version that one rank has written.

    Attributes:
        shapes: shapes of the whole tensors of its slices, by name.
        digests: digests of its slices.
        changes: parts with changes; None if no rank holds the version before.
        full: parts with all values; None if the version has no full copy.
        encode_seconds: seconds of encoding, with the digests.
        write_seconds: seconds of writing to the store.
    """

    shapes: Mapping[str, tuple[int, ...]]
    digests: Sequence[SliceDigest]
    changes: Sequence[PartEntry] | None
    full: Sequence[PartEntry] | None
    encode_seconds: float
    write_seconds: float


def digest_slice(one: Slice) -> SliceDigest:
    """Return the digest of a slice in host memory."""
    return SliceDigest(one.name, one.start, one.values.numel(), values_digest(one.values), one.rows, one.stride)


def write_share(
    store: Store,
    chain: Chain,
    rank: int,
    slices: Iterable[Slice],
    held: Sequence[Slice] | None,
    full: bool,
    bits: int | None,
) -> Share:
    """Write this rank's share of the version after `chain`, slice by slice, and set `held` to it.

    Args:
        store: the store.
        chain: end of the chain of versions.
        rank: this rank.
        slices: its slices in host memory, each of which is needed until the next one is taken. With lossy changes, they
            are set to the values that these lead to.
        held: the same slices of the version before; None if it is not known.
        full: write a full copy too.
        bits: bits per value of lossy changes; None for exact ones.
    """
    began, version = time.perf_counter(), chain.version + 1
    changes, copies = (PartWriter(store, part_stem(version, kind, rank, chain.publisher)) for kind in (False, True))
    encode_change = encode if bits is None else partial(encode_lossy, bits=bits)
    shapes, digests = {}, []
    for one, old in zip(slices, repeat(None) if held is None else held, strict=held is not None):
        payload = None if old is None else encode_change(old.values, one.values)
        shapes[one.name] = one.shape
        digests.append(digest_slice(one))
        if old is not None and payload is not None:
            changes.add(EncodedSlice(digests[-1], payload))
            old.values.copy_(one.values)
        if full:
            copies.add(EncodedSlice(digests[-1], encode(None, one.values)))
    changed, whole = None if held is None else changes.end(), copies.end() if full else None
    writing = changes.seconds + copies.seconds
    return Share(shapes, digests, changed, whole, time.perf_counter() - began - writing, writing)


def make_manifest(
    chain: Chain, dtype: Dtype, shares: Sequence[Share], adapter: AdapterConfig | None = None
) -> Manifest:
    """Return the manifest of the version after `chain`, of which all ranks have written `shares`.

    Raises:
        UnsupportedError: the shares are not exactly one copy of a model.
    """
    tensors = {name: shape for share in shares for name, shape in share.shapes.items()}
    slices = sorted(digest for share in shares for digest in share.digests)
    _check_cover(tensors, slices)
    changes = [entry for share in shares for entry in share.changes or ()]
    full = [entry for share in shares for entry in share.full or ()]
    has_changes = all(share.changes is not None for share in shares)
    return Manifest(
        version=chain.version + 1,
        dtype=dtype,
        tensors=tensors,
        digest=model_digest(slices),
        changes=Changes(base=chain.version, base_digest=chain.digest, parts=tuple(changes)) if has_changes else None,
        full=tuple(full) if all(share.full is not None for share in shares) else None,
        adapter=adapter,
    )


def _check_cover(tensors: Mapping[str, tuple[int, ...]], slices: Sequence[SliceDigest]) -> None:
    """Check that `slices` are every element of `tensors` exactly once."""
    rows: defaultdict[str, list[Tensor]] = defaultdict(list)
    for one in slices:
        starts = one.start + one.stride * torch.arange(one.rows)
        rows[one.name].append(torch.stack([starts, starts + one.numel // one.rows]))
    for name, shape in tensors.items():
        starts, ends = torch.cat(rows[name], 1).sort(1).values
        if starts[0] != 0 or ends[-1] != math.prod(shape) or not torch.equal(starts[1:], ends[:-1]):
            raise UnsupportedError(f'ranks publish elements of "{name}" twice or not at all')
