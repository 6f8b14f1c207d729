"""State files: the state of one rank between steps, as a safetensors file and a JSON file that describes it.

The JSON is written last and contains a digest of both, so an incomplete pair is refused. Reading executes nothing. The
number of ranks may differ when a state is loaded: see `sources`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspeed_compress.compression.residual_stores import kind_of
from deepspeed_compress.compression.residuals import STORAGE, Residuals
from deepspeed_compress.compression.segments import Layout, numel_of
from deepspeed_compress.compression.state_description import VERSION, Description, Moment, Position, read_description
from deepspeed_compress.compression.transforms import Transform, described, transform_of
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import open_regular

STEM = "deepspeed_compress"
"""Prefix of the file names."""
SHARED = frozenset({"factors"})
"""Kinds of stores that are equal on all ranks of a data-parallel group."""
OWNED = frozenset({"means", "node_means", "spread", "anchor", "outer_momentum"})
"""Kinds of stores in which one rank owns each element. All other stores add up over the ranks."""


_SavedStore = tuple[Mapping[Layout, Tensor], Mapping[Layout, Transform]]
"""The payload and the basis of each message of a store."""


def state_file(directory: Path, rank: int, stem: str = STEM) -> Path:
    """Return the path of the tensors of global rank `rank` in a checkpoint's tag directory. The JSON is next to it."""
    return directory / f"{stem}_rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Contents:
    """Contents of a pair of files. The digest of `description` is still empty."""

    tensors: Mapping[str, Tensor]
    description: Description


def contents(
    stores: Mapping[str, Residuals],
    position: Position,
    moment: Moment,
    section: Mapping[str, Any],
    decisions: Mapping[str, Any],
) -> Contents:
    """Return the contents of `stores` at `moment`, which is now. Tensors on the host may share memory with them."""
    held = {name: list(store.payloads()) for name, store in stores.items()}
    tensors = {f"{name}/{n}": payload.cpu() for name, slots in held.items() for n, (_, payload) in enumerate(slots)}
    description = Description(
        version=VERSION,
        sha256="",
        position=position,
        # A scaler may have an integer, which would be read as a float, and have another digest.
        **asdict(replace(moment, loss_scale=float(moment.loss_scale))),
        section=section,
        decisions=decisions,
        storage={name: store.dtype for name, store in stores.items()},
        layouts={name: [layout for layout, _ in slots] for name, slots in held.items()},
        bases={name: [described(basis) for basis in stores[name].bases().values()] for name in held},
    )
    return Contents(tensors, description)


def write(contents: Contents, file: Path, held: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Write `file` and its JSON under temporary names, and rename both at the end, while `held()` is entered."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # A process that outlives its rank may write the same file as the next run.
    tensors, text = (file.with_suffix(f".{os.getpid()}.{kind}.tmp") for kind in ("tensors", "json"))
    try:
        save_file(dict(contents.tensors), tensors)
        description = replace(contents.description, sha256=_digest(tensors, contents.description))
        text.write_text(json.dumps(description.fields, indent=1), encoding="utf-8")
        with held():
            # A half-replaced pair must not look complete.
            file.with_suffix(".json").unlink(missing_ok=True)
            os.replace(tensors, file)
            os.replace(text, file.with_suffix(".json"))
    finally:
        for temporary in (tensors, text):
            temporary.unlink(missing_ok=True)


def _digest(file: Path, description: Description) -> str:
    fields = json.dumps(replace(description, sha256="").fields, sort_keys=True)
    with open_regular(file) as stream:
        tensors = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{tensors}{fields}".encode()).hexdigest()


def _read_stores(file: Path, description: Description) -> dict[str, _SavedStore]:
    """Return the saved stores by name.

    Raises:
        StateError: the file is not the one that was described.
    """
    try:
        if _digest(file, description) != description.sha256:
            raise StateError(f"{file} or the JSON file next to it is damaged: the digest does not match")
        tensors = load_file(file)
        return {
            name: (
                {
                    layout: _payload(tensors[f"{name}/{n}"], layout, description.storage[name])
                    for n, layout in enumerate(slots)
                },
                dict(zip(slots, map(transform_of, description.bases[name]), strict=True)),
            )
            for name, slots in description.layouts.items()
        }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{file} is missing or damaged ({error!r})") from error


def _payload(found: Tensor, layout: Layout, storage: str) -> Tensor:
    """Return `found` after checking its size, because decoders read it unchecked.

    Raises:
        ValueError: it is not the payload of a message of `layout`.
    """
    size = STORAGE[storage].payload_bytes(numel_of(layout))
    if found.dtype != torch.uint8 or found.shape != (size,):
        raise ValueError(
            f"{found.dtype} {list(found.shape)} for {numel_of(layout)} elements in {size} bytes of {storage}"
        )
    return found


def sources(directory: Path, rank: int, position: Position, stem: str = STEM) -> list[tuple[Path, Description]]:
    """Return the files that global rank `rank` at `position` must read: its own, or all if the group's size changed.

    Raises:
        StateError: a file is missing or does not fit.
    """
    own, problem = state_file(directory, rank, stem), None
    try:
        description = read_description(own)
        if description.position == position and _has_size(state_file(directory, 0, stem), position):
            return [(own, description)]
    except StateError as error:
        problem = error
    first = read_description(state_file(directory, 0, stem)).position
    if first.groups != position.groups:
        raise StateError(
            f"{directory}: saved by {first.groups} groups of ranks that average their gradients, but this run has "
            f"{position.groups}; tensor ranks, pipeline stages and ranks of a node (shard_within) must stay the same"
        )
    if first.node_size != position.node_size or (first.size != position.size and position.node_size > 1):
        raise StateError(
            f"{directory}: saved by {first.size} ranks, {first.node_size} of them on each node, but this run has "
            f"{position.size} and {position.node_size}. With a hierarchy, neither number may change"
        )
    if first.size == position.size:
        raise problem or StateError(f"{own} was saved by another rank")
    files = [state_file(directory, peer, stem) for peer in range(first.groups * first.size)]
    found = [(file, read_description(file)) for file in files]
    return [(file, description) for file, description in found if description.position.group == position.group]


def _has_size(first: Path, position: Position) -> bool:
    """Return True if the first rank's file, which another host may not see, was saved by as many ranks as `position`.

    Otherwise an earlier save of the same tag, by more ranks, has left the files of the last ones.
    """
    if not first.with_suffix(".json").is_file():
        return True
    saved = read_description(first).position
    return (saved.size, saved.groups, saved.node_size) == (position.size, position.groups, position.node_size)


def restore(
    stores: Mapping[str, Residuals],
    found: Sequence[tuple[Path, Description]],
    position: Position,
    loss_scale: float,
    device: torch.device,
) -> bool:
    """Fill `stores` from the files of `sources`. Return True if all files were saved by this very rank.

    If the size of the group has changed, stores that add up are redistributed: rank i adds the states of the old ranks
    i, i + size, i + 2 size ..., so the sum over the ranks is unchanged. Stores with owned elements are loaded on every
    rank, for `Residuals.prune`.
    """
    for store in stores.values():
        store.clear()
    same = len(found) == 1 and found[0][1].position == position
    for file, description in found:
        saved = _read_stores(file, description)
        for name in stores.keys() & saved.keys():
            if same or _takes(name, description.position, position):
                exact = same and description.storage[name] == stores[name].dtype
                factor = 0.0 if kind_of(name) in OWNED else 1.0
                _load(stores[name], saved[name], description.storage[name], exact, device, factor)
        change = loss_scale / description.loss_scale
    for store in stores.values() if change != 1.0 else ():
        store.scale(change)
    return same


def _takes(name: str, saved: Position, position: Position) -> bool:
    if kind_of(name) in SHARED:
        return saved.index == 0
    return kind_of(name) in OWNED or saved.index % position.size == position.index


def _load(store: Residuals, saved: _SavedStore, storage: str, exact: bool, device: torch.device, factor: float) -> None:
    payloads, bases = saved
    if exact:
        store.restore(payloads, device, bases)
        return
    # Owned elements may be in several files: without ZeRO, all ranks own spread sums.
    former = Residuals(storage, transactional=False)
    former.restore(payloads, torch.device("cpu"), bases)
    store.add(former.items(), device, factor)
