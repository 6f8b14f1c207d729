"""State files: what one rank remembers between steps, as a safetensors file and a JSON file that describes it.

The JSON is written last and holds the digest of the other, so a pair is complete or it is refused. Nothing in them is
executed when they are read. Ranks may be more or fewer when a state is loaded: see `Sources`.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspeed_compress.compression.residuals import Layout, Residuals
from deepspeed_compress.errors import StateError

__all__ = ["OWNED", "SHARED", "Description", "Position", "read_description", "restore", "save", "sources", "state_file"]

VERSION = 2
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
    messages, in the order of the tensors "NAME/0", "NAME/1" ... `storage`: how the memory is encoded. `loss_scale`: the
    factor that the values carry. `decisions`: what the policy remembers, equal on all ranks.
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


def state_file(directory: Path, rank: int, stem: str = STEM) -> Path:
    """The tensors of global rank `rank` in a checkpoint's tag directory; the JSON is beside it."""
    return directory / f"{stem}_rank_{rank:05d}.safetensors"


def save(
    stores: Mapping[str, Residuals],
    file: Path,
    position: Position,
    zero_stage: int,
    step: int,
    loss_scale: float,
    section: Mapping[str, Any],
    decisions: Mapping[str, Any],
) -> None:
    """Write `stores` to `file` and its JSON, each under a temporary name that is changed at the end."""
    held = {name: list(store.payloads()) for name, store in stores.items()}
    tensors = {f"{name}/{n}": payload.cpu() for name, slots in held.items() for n, (_, payload) in enumerate(slots)}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary)
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
    )
    description = replace(description, sha256=_digest(temporary, description))
    # A pair that is half replaced must not look whole.
    file.with_suffix(".json").unlink(missing_ok=True)
    os.replace(temporary, file)
    temporary.write_text(json.dumps(asdict(description), indent=1), encoding="utf-8")
    os.replace(temporary, file.with_suffix(".json"))


def _digest(file: Path, description: Description) -> str:
    fields = json.dumps(asdict(replace(description, sha256="")), sort_keys=True)
    with file.open("rb") as stream:
        tensors = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{tensors}{fields}".encode()).hexdigest()


def read_description(file: Path) -> Description:
    """The JSON beside `file`. StateError if it is missing, damaged, or not of this package and version."""
    path = file.with_suffix(".json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise StateError(f"{path} has version {found['version']}, this package reads {VERSION}")
        layouts = {name: [_layout(layout) for layout in slots] for name, slots in found["layouts"].items()}
        return Description(**{**found, "position": Position(**found["position"]), "layouts": layouts})
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist{_why_missing(path.parent)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
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
    return tuple((str(name), int(begin), int(numel)) for name, begin, numel in ranges)


def _read_tensors(file: Path, description: Description) -> dict[str, list[tuple[Layout, Tensor]]]:
    """By memory, each message's layout and payload. StateError unless the file is the one that was described."""
    try:
        if _digest(file, description) != description.sha256:
            raise StateError(f"{file} or the JSON file beside it is damaged: the digest does not fit")
        tensors = load_file(file)
        return {
            name: [(layout, tensors[f"{name}/{n}"]) for n, layout in enumerate(slots)]
            for name, slots in description.layouts.items()
        }
    except (OSError, SafetensorError, KeyError) as error:
        raise StateError(f"{file} is missing or damaged ({error!r})") from error


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
        tensors = _read_tensors(file, description)
        for name in stores.keys() & tensors.keys():
            if same or _takes(name, description.position, position):
                exact = same and description.storage[name] == stores[name].dtype
                factor = 0.0 if name in OWNED else 1.0
                _load(stores[name], tensors[name], description.storage[name], exact, device, factor)
        change = loss_scale / description.loss_scale
    for store in stores.values() if change != 1.0 else ():
        store.scale(change)
    return same


def _takes(name: str, saved: Position, position: Position) -> bool:
    if name in SHARED:
        return saved.index == 0
    return name in OWNED or saved.index % position.size == position.index


def _load(
    store: Residuals,
    slots: Sequence[tuple[Layout, Tensor]],
    storage: str,
    exact: bool,
    device: torch.device,
    factor: float,
) -> None:
    if exact:
        store.restore(dict(slots), device)
        return
    # What has an owner may stand in several files: without ZeRO all ranks own what was spread.
    former = Residuals(storage, transactional=False)
    former.restore(dict(slots), torch.device("cpu"))
    store.add(former.items(), device, factor)
