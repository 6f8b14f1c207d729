"""Descriptions of saved states: the JSON file of a rank, which says whose values its tensors are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deepspeed_compress.compression.residuals import STORAGE
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import read_text

VERSION = 3
_MAX_RANKS = 1 << 20
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
_Scale = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


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

    __pydantic_config__ = ConfigDict(extra="forbid")
    index: _Count
    size: _Count
    group: _Count
    groups: _Count
    node_size: _Count = 1


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

    __pydantic_config__ = ConfigDict(extra="forbid")
    version: int
    sha256: str
    position: Position
    zero_stage: _Count
    step: _Count
    loss_scale: _Scale
    section: Mapping[str, Any]
    decisions: Mapping[str, Any]
    storage: Mapping[str, str]
    layouts: Mapping[str, Sequence[tuple[tuple[str, _Count, _Count], ...]]]
    bases: Mapping[str, Sequence[Mapping[str, Any]]]
    save: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the JSON fields. An empty `save` is left out."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("save", "")}


_DESCRIPTION = TypeAdapter(Description)
"""Checks the types of the fields of a file."""


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
        return _checked(_DESCRIPTION.validate_python(found))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, value = "/" + "/".join(map(str, first["loc"])), f"{first['input']!r:.60}"
        problem = f"{key:.200} is {value}: {first['msg']}"
        # Not chained: the error has an entry for every wrong value.
        raise StateError(f"{path} is damaged or not a state of this package ({problem})") from None
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist (was the checkpoint written without this package?)") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged or not a state of this package ({error!r})") from error


def _checked(found: Description) -> Description:
    """Return `found` after checking what its types leave open.

    Raises:
        ValueError, KeyError: a field is not one that `contents` writes.
    """
    place = found.position
    if place.index >= place.size or place.group >= place.groups or place.size * place.groups > _MAX_RANKS:
        raise ValueError(f"{place}: no such rank")
    for name, slots in found.layouts.items():
        if found.storage[name] not in STORAGE or len(found.bases[name]) != len(slots):
            raise ValueError(f"{name}: storage {found.storage[name]!r:.60}, {len(found.bases[name])} bases")
    return found
