"""Shares of a version: what each rank writes, and the manifest that the first rank makes of it."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.rollout.adapters import AdapterConfig
from deepspeed_compress.rollout.chain import Chain
from deepspeed_compress.rollout.changes import encode, encode_lossy
from deepspeed_compress.rollout.parts import EncodedSlice, PartEntry, SliceDigest, values_digest, write_parts
from deepspeed_compress.rollout.slices import Slice
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Changes, Dtype, Manifest, model_digest, part_stem


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


class _TimedWriter:
    """Writer to a store that measures its time, apart from the time of encoding between the writes.

    Attributes:
        seconds: seconds of writing so far.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._began, self.seconds = store, time.perf_counter(), 0.0

    def put(self, name: str, data: bytes) -> None:
        began = time.perf_counter()
        self._store.put(name, data)
        self.seconds += time.perf_counter() - began

    @property
    def other_seconds(self) -> float:
        """Return the seconds since the start that were not spent writing."""
        return time.perf_counter() - self._began - self.seconds


def digest_slices(slices: Sequence[Slice]) -> list[SliceDigest]:
    """Return the digests of slices in host memory."""
    return [
        SliceDigest(one.name, one.start, one.values.numel(), values_digest(one.values), one.rows, one.stride)
        for one in slices
    ]


def write_share(
    store: Store,
    chain: Chain,
    rank: int,
    slices: Sequence[Slice],
    held: Sequence[Slice] | None,
    full: bool,
    bits: int | None,
) -> Share:
    """Write this rank's share of the version after `chain`.

    With lossy changes, set `slices` to the values that they lead to.

    Args:
        store: the store.
        chain: end of the chain of versions.
        rank: this rank.
        slices: its slices in host memory.
        held: the same slices of the version before; None if it is not known.
        full: write a full copy too.
        bits: bits per value of lossy changes; None for exact ones.
    """
    writer, version = _TimedWriter(store), chain.version + 1
    payloads = None if held is None else _encode_changes(slices, held, bits)
    digests, changes, copies = digest_slices(slices), None, None
    if payloads is not None:
        changes = write_parts(writer.put, part_stem(version, False, rank, chain.claim), _encoded(digests, payloads))
    if full:
        copied = (encode(None, one.values) for one in slices)
        copies = write_parts(writer.put, part_stem(version, True, rank, chain.claim), _encoded(digests, copied))
    shapes = {one.name: one.shape for one in slices}
    return Share(shapes, digests, changes, copies, writer.other_seconds, writer.seconds)


def _encode_changes(slices: Sequence[Slice], held: Sequence[Slice], bits: int | None) -> Iterable[bytes]:
    """Return the changes from `held` to `slices`. Lossy ones are encoded at once, because they set `slices`."""
    pairs = zip(held, slices, strict=True)
    if bits is None:
        return (encode(old.values, one.values) for old, one in pairs)
    return [encode_lossy(old.values, one.values, bits) for old, one in pairs]


def _encoded(digests: Sequence[SliceDigest], payloads: Iterable[bytes]) -> Iterator[EncodedSlice]:
    for digest, payload in zip(digests, payloads, strict=True):
        yield EncodedSlice(digest, payload)


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
