"""State files: the state of one rank between steps, as a safetensors file and a JSON file that describes it.

The JSON is written last and contains a digest of both, so an incomplete pair is refused. Reading executes nothing. The
number of ranks may differ when a state is loaded: see `sources`.
"""

import hashlib
import json
import math
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

from deepspeed_compress.compression.layouts import Layout, numel_of
from deepspeed_compress.compression.residual_stores import kind_of
from deepspeed_compress.compression.residuals import STORAGE, Residuals
from deepspeed_compress.compression.transforms import Transform, described, transform_of
from deepspeed_compress.errors import StateError

VERSION = 3
_MAX_RANKS = 1 << 20
STEM = "deepspeed_compress"
"""Prefix of the file names."""
SHARED = frozenset({"factors"})
"""Kinds of stores that are equal on all ranks of a data-parallel group."""
OWNED = frozenset({"means", "node_means", "spread", "anchor", "outer_momentum"})
"""Kinds of stores in which one rank owns each element. All other stores add up over the ranks."""


@dataclass(frozen=True)
class Position:
    """Position of a rank.

    Attributes:
        index: rank in its data-parallel group.
        size: size of that group.
        group: number of that group.
        groups: number of data-parallel groups.
        node_size: ranks of the group that reduce inside a node first; 1 without a hierarchy.
    """

    index: int
    size: int
    group: int
    groups: int
    node_size: int = 1


@dataclass(frozen=True)
class Description:
    """Contents of the JSON file.

    Attributes:
        version: version of the format.
        sha256: digest of the tensors' file and of all other fields.
        position: position of the rank that saved the state.
        zero_stage: ZeRO stage.
        step: step at which the state was saved.
        loss_scale: factor that the values carry.
        section: settings under which the state was saved.
        decisions: state of the policy, equal on all ranks.
        storage: storage format of each store.
        layouts: by store, the parameter ranges of each of its messages, in the order of the tensors "NAME/0", "NAME/1"
            ...
        bases: by store, the basis of each of its messages (see `transforms.described`).
        save: name of the save, which the engine's files contain, too; empty without such files, and in files of earlier
            versions of this package.
    """

    version: int
    sha256: str
    position: Position
    zero_stage: int
    step: int
    loss_scale: float
    section: Mapping[str, Any]
    decisions: Mapping[str, Any]
    storage: Mapping[str, str]
    layouts: Mapping[str, Sequence[Layout]]
    bases: Mapping[str, Sequence[Mapping[str, Any]]]
    save: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the JSON fields. An empty `save` is left out, since digests of earlier versions do not cover it."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("save", "")}


@dataclass(frozen=True)
class _SavedStore:
    """Saved content of one store: the payload and the basis of each message."""

    payloads: Mapping[Layout, Tensor]
    bases: Mapping[Layout, Transform]


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
    zero_stage: int,
    step: int,
    loss_scale: float,
    section: Mapping[str, Any],
    decisions: Mapping[str, Any],
    save: str = "",
) -> Contents:
    """Return the current contents of `stores`. Tensors on the host may share memory with them."""
    held = {name: list(store.payloads()) for name, store in stores.items()}
    tensors = {f"{name}/{n}": payload.cpu() for name, slots in held.items() for n, (_, payload) in enumerate(slots)}
    description = Description(
        version=VERSION,
        sha256="",
        position=position,
        zero_stage=zero_stage,
        step=step,
        loss_scale=loss_scale,
        section=section,
        decisions=decisions,
        storage={name: store.dtype for name, store in stores.items()},
        layouts={name: [layout for layout, _ in slots] for name, slots in held.items()},
        bases={name: [described(basis) for basis in stores[name].bases().values()] for name in held},
        save=save,
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
    with file.open("rb") as stream:
        tensors = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{tensors}{fields}".encode()).hexdigest()


def read_description(file: Path) -> Description:
    """Return the description in the JSON next to `file`.

    Raises:
        StateError: the file is missing, damaged, or not of this package or of another version.
    """
    path = file.with_suffix(".json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise StateError(f"{path} has version {found['version']}; this package reads {VERSION}")
        layouts = {name: [_layout(layout) for layout in slots] for name, slots in found["layouts"].items()}
        position = Position(**found["position"])
        return _checked(Description(**{**found, "position": position, "layouts": layouts}))
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist{_why_missing(path.parent)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged or not a state of this package ({error!r})") from error


def _why_missing(directory: Path) -> str:
    """Return a likely reason why the checkpoint in `directory` has no state."""
    if (directory / "zero").is_dir():
        return (
            ": this is a universal checkpoint, and DeepSpeed's converter omits the state of this package; copy the "
            "files deepspeed_compress_rank_* of the original checkpoint into it"
        )
    return " (was the checkpoint written without this package?)"


def _layout(ranges: Sequence[Sequence[Any]]) -> Layout:
    """Return the ranges of a message.

    Raises:
        ValueError, TypeError: they are not ranges.
    """
    return tuple((_name(name), _count(begin), _count(numel)) for name, begin, numel in ranges)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a name")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r:.60} is not a count")
    return value


def _checked(found: Description) -> Description:
    """Return `found` after checking its fields.

    Raises:
        ValueError, TypeError, KeyError: a field is not one that `contents` writes.
    """
    place, scale = found.position, found.loss_scale
    for number in (place.index, place.size, place.group, place.groups, place.node_size, found.zero_stage, found.step):
        _count(number)
    if place.index >= place.size or place.group >= place.groups or place.size * place.groups > _MAX_RANKS:
        raise ValueError(f"{place}: no such rank")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale {scale!r:.60}")
    for name in (found.sha256, found.save):
        _name(name)
    for fields in (found.section, found.decisions):
        fields.keys()
    for name, slots in found.layouts.items():
        if found.storage[name] not in STORAGE or len(found.bases[name]) != len(slots):
            raise ValueError(f"{name}: storage {found.storage[name]!r:.60}, {len(found.bases[name])} bases")
    return found


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
            name: _SavedStore(
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
    if exact:
        store.restore(saved.payloads, device, saved.bases)
        return
    # Owned elements may be in several files: without ZeRO, all ranks own spread sums.
    former = Residuals(storage, transactional=False)
    former.restore(saved.payloads, torch.device("cpu"), saved.bases)
    store.add(former.items(), device, factor)
