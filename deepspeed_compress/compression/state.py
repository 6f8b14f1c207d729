"""State files: what one rank remembers between steps, as a safetensors file and a JSON file that describes it.

The JSON is written last and holds the digest of the other, so a pair is complete or it is refused. Nothing in them is
executed when they are read. Ranks may be more or fewer when a state is loaded: see `Sources`.
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
from deepspeed_compress.compression.residuals import STORAGE, Residuals
from deepspeed_compress.compression.transforms import Identity, Transform, described, transform_of
from deepspeed_compress.errors import StateError

__all__ = [
    "OWNED",
    "SHARED",
    "Contents",
    "Description",
    "Position",
    "contents",
    "read_description",
    "restore",
    "sources",
    "state_file",
    "write",
]

VERSION = 3
BEFORE_BASES = 2
"""The version whose values are all elements of parameters; it is read too."""
_MOST_RANKS = 1 << 20
STEM = "deepspeed_compress"
"""Of the names of files."""
SHARED = frozenset({"factors"})
"""Memories that are equal on all ranks of a data-parallel group."""
OWNED = frozenset({"means", "node_means", "spread", "anchor", "outer_momentum"})
"""Memories in which every element has one rank that owns it. All others add up over the ranks."""


@dataclass(frozen=True)
class Position:
    """Where a rank is: rank `index` of `size` in the data-parallel group number `group` of `groups`.

    `node_size`: ranks of the group that reduce inside a node first; 1 without a hierarchy.
    """

    index: int
    size: int
    group: int
    groups: int
    node_size: int = 1


@dataclass(frozen=True)
class Description:
    """The JSON file: where and when the state was saved, under which settings, and what each tensor is.

    `sha256`: of the tensors' file and of all other fields. `layouts`: by memory, the parameter ranges of each of its
    messages, in the order of the tensors "NAME/0", "NAME/1" ... `bases`: the basis of each of these (see
    `transforms.described`). `storage`: how the memory is encoded. `loss_scale`: the factor that the values carry.
    `decisions`: what the policy remembers, equal on all ranks.
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


@dataclass(frozen=True)
class _Memory:
    """What a file has of one store: by message, its payload and its basis."""

    payloads: Mapping[Layout, Tensor]
    bases: Mapping[Layout, Transform]


def state_file(directory: Path, rank: int, stem: str = STEM) -> Path:
    """The tensors of global rank `rank` in a checkpoint's tag directory; the JSON is beside it."""
    return directory / f"{stem}_rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Contents:
    """What a pair of files will hold; the digest of `description` is still empty."""

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
) -> Contents:
    """Of `stores` as they are now; tensors on the host may be theirs."""
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
    )
    return Contents(tensors, description)


def write(contents: Contents, file: Path, held: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Write `file` and its JSON, each under a temporary name that is changed at the end, while `held()`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # A process that outlives its rank may write the same file as the run that follows.
    tensors, text = (file.with_suffix(f".{os.getpid()}.{kind}.tmp") for kind in ("tensors", "json"))
    save_file(dict(contents.tensors), tensors)
    description = replace(contents.description, sha256=_digest(tensors, contents.description))
    text.write_text(json.dumps(asdict(description), indent=1), encoding="utf-8")
    try:
        with held():
            # A pair that is half replaced must not look whole.
            file.with_suffix(".json").unlink(missing_ok=True)
            os.replace(tensors, file)
            os.replace(text, file.with_suffix(".json"))
    finally:
        for temporary in (tensors, text):
            temporary.unlink(missing_ok=True)


def _digest(file: Path, description: Description) -> str:
    plain = asdict(replace(description, sha256=""))
    if description.version == BEFORE_BASES:
        del plain["bases"]
    fields = json.dumps(plain, sort_keys=True)
    with file.open("rb") as stream:
        tensors = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{tensors}{fields}".encode()).hexdigest()


def read_description(file: Path) -> Description:
    """The JSON beside `file`. StateError if it is missing, damaged, or not of this package and version."""
    path = file.with_suffix(".json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] == BEFORE_BASES:
            found["bases"] = {name: [described(Identity())] * len(slots) for name, slots in found["layouts"].items()}
        elif found["version"] != VERSION:
            raise StateError(f"{path} has version {found['version']}, this package reads {BEFORE_BASES} and {VERSION}")
        layouts = {name: [_layout(layout) for layout in slots] for name, slots in found["layouts"].items()}
        position = Position(**found["position"])
        return _checked(Description(**{**found, "position": position, "layouts": layouts}))
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist{_why_missing(path.parent)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged or not a state of this package ({error!r})") from error


def _why_missing(directory: Path) -> str:
    """What made a checkpoint without a state, as far as its directory tells."""
    if (directory / "zero").is_dir():
        return (
            ": this is a universal checkpoint, and DeepSpeed's converter leaves the state of this package behind; copy "
            "the files deepspeed_compress_rank_* of the checkpoint that was converted into it"
        )
    return " (was the checkpoint written without this package?)"


def _layout(ranges: Sequence[Sequence[Any]]) -> Layout:
    """Return the ranges of a message. ValueError or TypeError where they are none."""
    return tuple((_name(name), _count(begin), _count(numel)) for name, begin, numel in ranges)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no name")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r:.60} is no count")
    return value


def _checked(found: Description) -> Description:
    """Return `found`. ValueError, TypeError or KeyError where a field is not what `contents` writes."""
    place, scale = found.position, found.loss_scale
    for number in (place.index, place.size, place.group, place.groups, place.node_size, found.zero_stage, found.step):
        _count(number)
    if place.index >= place.size or place.group >= place.groups or place.size * place.groups > _MOST_RANKS:
        raise ValueError(f"{place}: no such rank")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale {scale!r:.60}")
    _name(found.sha256)
    for fields in (found.section, found.decisions):
        fields.keys()
    for name, slots in found.layouts.items():
        if found.storage[name] not in STORAGE or len(found.bases[name]) != len(slots):
            raise ValueError(f"{name}: storage {found.storage[name]!r:.60}, {len(found.bases[name])} bases")
    return found


def _read_memories(file: Path, description: Description) -> dict[str, _Memory]:
    """By name. StateError unless the file is the one that was described."""
    try:
        if _digest(file, description) != description.sha256:
            raise StateError(f"{file} or the JSON file beside it is damaged: the digest does not fit")
        tensors = load_file(file)
        return {
            name: _Memory(
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
    """Return `found`. ValueError where it is not the payload of a message of `layout`: decoders read it unchecked."""
    size = STORAGE[storage].payload_bytes(numel_of(layout))
    if found.dtype != torch.uint8 or found.shape != (size,):
        raise ValueError(
            f"{found.dtype} {list(found.shape)} for {numel_of(layout)} elements in {size} bytes of {storage}"
        )
    return found


def sources(directory: Path, rank: int, position: Position, stem: str = STEM) -> list[tuple[Path, Description]]:
    """The files that global rank `rank`, at `position`, has to read: its own, or when the group has another size, all.

    Raises StateError when one of them is missing or does not fit.
    """
    own, problem = state_file(directory, rank, stem), None
    try:
        description = read_description(own)
        if description.position == position:
            return [(own, description)]
    except StateError as error:
        problem = error
    first = read_description(state_file(directory, 0, stem)).position
    if first.groups != position.groups:
        raise StateError(
            f"{directory}: saved with {first.groups} combinations of tensor and pipeline rank, this run has "
            f"{position.groups}; only the data-parallel size may change"
        )
    if first.node_size != position.node_size or (first.size != position.size and position.node_size > 1):
        raise StateError(
            f"{directory}: saved by {first.size} ranks, {first.node_size} of them on a node; this run has "
            f"{position.size} and {position.node_size}. With a hierarchy neither may change"
        )
    if first.size == position.size:
        raise problem or StateError(f"{own} was saved by another rank")
    files = [state_file(directory, peer, stem) for peer in range(first.groups * first.size)]
    found = [(file, read_description(file)) for file in files]
    return [(file, description) for file, description in found if description.position.group == position.group]


def restore(
    stores: Mapping[str, Residuals],
    found: Sequence[tuple[Path, Description]],
    position: Position,
    loss_scale: float,
    device: torch.device,
) -> bool:
    """Fill `stores` from the files of `sources`; whether every value is the one that this very rank saved.

    When the group has another size, what adds up is added up: rank i takes the states of the old ranks i, i + size,
    i + 2 size ..., so the sum over the ranks stays. What has an owner is loaded everywhere, for `Residuals.prune`.
    """
    for store in stores.values():
        store.clear()
    same = len(found) == 1 and found[0][1].position == position
    for file, description in found:
        memories = _read_memories(file, description)
        for name in stores.keys() & memories.keys():
            if same or _takes(name, description.position, position):
                exact = same and description.storage[name] == stores[name].dtype
                factor = 0.0 if name in OWNED else 1.0
                _load(stores[name], memories[name], description.storage[name], exact, device, factor)
        change = loss_scale / description.loss_scale
    for store in stores.values() if change != 1.0 else ():
        store.scale(change)
    return same


def _takes(name: str, saved: Position, position: Position) -> bool:
    if name in SHARED:
        return saved.index == 0
    return name in OWNED or saved.index % position.size == position.index


def _load(store: Residuals, memory: _Memory, storage: str, exact: bool, device: torch.device, factor: float) -> None:
    if exact:
        store.restore(memory.payloads, device, memory.bases)
        return
    # What has an owner may stand in several files: without ZeRO all ranks own what was spread.
    former = Residuals(storage, transactional=False)
    former.restore(memory.payloads, torch.device("cpu"), memory.bases)
    store.add(former.items(), device, factor)
