"""Descriptions of saved states: the JSON file of a rank, which says whose values its tensors are."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.compression.residuals import STORAGE
from deepspeed_compress.compression.segments import Layout
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import read_text

VERSION = 3
_MAX_RANKS = 1 << 20


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
class Moment:
    """State of the engine at a save.

    Attributes:
        zero_stage: ZeRO stage.
        step: optimizer steps that were taken.
        loss_scale: factor that the values carry.
        save: name of the save, which the engine's files contain, too; empty without such files.
    """

    zero_stage: int
    step: int
    loss_scale: float = 1.0
    save: str = ""


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
        save: name of the save, which the engine's files contain, too; empty without such files.
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
        """Return the JSON fields. An empty `save` is left out."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("save", "")}


def read_description(file: Path) -> Description:
    """Return the description in the JSON next to `file`.

    Raises:
        StateError: the file is missing, damaged, or not of this package or of another version.
    """
    path = file.with_suffix(".json")
    try:
        found = json.loads(read_text(path))
        if found["version"] != VERSION:
            raise StateError(f"{path} has version {found['version']}; this package reads {VERSION}")
        layouts = {name: [_layout(layout) for layout in slots] for name, slots in found["layouts"].items()}
        position = Position(**found["position"])
        return _checked(Description(**{**found, "position": position, "layouts": layouts}))
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist (was the checkpoint written without this package?)") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged or not a state of this package ({error!r})") from error


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
