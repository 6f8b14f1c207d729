"""Completeness of a checkpoint: each rank lists its files with digests in a file next to them.

A list says that its files are unfinished before they are replaced, and names them after they were written. All lists
contain the name of one save. A directory with the lists of all ranks of one save is therefore complete, and damaged or
missing files can be named. `find_checkpoints` returns what is in a directory, while other processes write and remove
some.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass as checked_dataclass

from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import open_regular, read_text, write_text

VERSION = 1
STEM = "deepspeed_compress_files_rank_"
"""Beginning of the names of lists."""
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
"""File that names the universal checkpoint of a directory, for DeepSpeed."""
_REMOVED = ".deepspeed_compress_removed_"
"""Prefix of the tag of a checkpoint that is being removed."""
_UNFINISHED = "writing has not finished"
"""Problem of a list whose files are being written, or whose writer was killed."""


@dataclass(frozen=True)
class Save:
    """One call of `save_checkpoint`, equal on all ranks: number `number` of the run `run`.

    Attributes:
        directory: directory of the checkpoints.
        tag: name of this checkpoint's directory.
        run: name of the run.
        number: number of the save in the run.
        step: optimizer step.
        world: number of ranks.
        latest: let the file `latest` name the checkpoint once it is complete.
        automatic: True if the program did not request the save.
    """

    directory: Path
    tag: str
    run: str
    number: int
    step: int
    world: int
    latest: bool = True
    automatic: bool = False

    @property
    def place(self) -> Path:
        return self.directory / self.tag


def _check_inside(name: str) -> str:
    """Return a path below the tag directory.

    Raises:
        ValueError: it leads elsewhere.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name[:60]!r} is no path below the directory of a checkpoint")
    return name


_Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FileList:
    """The files that one rank has written. Values of other types, as in a damaged file, are a ValueError.

    Attributes:
        version: version of the format.
        run: see `Save`.
        number: see `Save`.
        step: see `Save`.
        rank: the rank.
        world: number of ranks.
        automatic: see `Save`.
        files: size in bytes and SHA-256 of each file, by its path below the tag directory.
        problem: reason why files are missing; empty if none is.
    """

    version: _Count
    run: str
    number: _Count
    step: _Count
    rank: _Count
    world: _Count
    automatic: StrictBool
    files: Mapping[Annotated[str, AfterValidator(_check_inside)], tuple[_Count, str]]
    problem: str = ""

    @property
    def is_unfinished(self) -> bool:
        """True while its files are being written, or if their writer was killed."""
        return self.problem == _UNFINISHED

    @property
    def fields(self) -> dict[str, Any]:
        """Return the JSON fields, including a digest of all of them."""
        found = asdict(self)
        return {**found, "sha256": _sha256_of(found)}


def _sha256_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def listed(save: Save, rank: int, digests: Mapping[Path, str], problem: str = "") -> FileList:
    """Return the list of existing files, given their SHA-256."""
    found = {file.relative_to(save.place).as_posix(): (file.stat().st_size, one) for file, one in digests.items()}
    return FileList(VERSION, save.run, save.number, save.step, rank, save.world, save.automatic, found, problem)


def unfinished(listed: FileList) -> FileList:
    """Return the list to write before the files of `listed` are replaced."""
    return replace(listed, files={}, problem=_UNFINISHED)


def write_list(place: Path, listed: FileList) -> None:
    """Write the list of `listed.rank` into the tag directory `place`."""
    write_text(list_file(place, listed.rank), json.dumps(listed.fields, indent=1))


def digest(file: Path) -> str:
    """Return the SHA-256 of `file`."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_file(place: Path, rank: int) -> Path:
    """Return the path of the list of `rank` in the tag directory `place`."""
    return place / f"{STEM}{rank:05d}.json"


def read_lists(place: Path) -> list[FileList]:
    """Return the lists in a tag directory, by rank.

    Raises:
        StateError: one of them cannot be read.
    """
    return [read_list(file) for file in list_paths(place)]


def list_paths(place: Path) -> list[Path]:
    """Return the paths of the lists in a tag directory, by rank."""
    return sorted(place.glob(f"{STEM}*.json"))


def read_list(file: Path) -> FileList:
    """Return the list in `file`.

    Raises:
        StateError: it cannot be read.
    """
    try:
        found = json.loads(read_text(file))
        if found.pop("sha256") != _sha256_of(found):
            raise StateError(f"{file} is damaged: its digest does not match")
        listed = FileList(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{file} is damaged ({' '.join(repr(error).split())})") from error
    if listed.version != VERSION:
        raise StateError(f"{file} has version {listed.version}, but this package reads version {VERSION}")
    return listed


def find_problems(place: Path, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Yield what is wrong with the checkpoint in the tag directory `place`; nothing for one without lists.

    Only lists number `part`, `part + parts` ... are compared with their files, so that ranks can share the work.
    """
    if not place.is_dir():
        yield f"{place} is missing"
        return
    try:
        lists = read_lists(place)
    except StateError as error:
        yield str(error)
        return
    yield from _find_gaps(place, lists)
    for listed in lists[part::parts]:
        yield from find_damaged(place, listed)


def _find_gaps(place: Path, lists: Sequence[FileList]) -> Iterator[str]:
    """Yield what is wrong with the lists in the tag directory `place`; nothing if all ranks have listed their files."""
    names, worlds = {(listed.run, listed.number) for listed in lists}, {listed.world for listed in lists}
    if len(names) > 1 or worlds - {len(lists)}:
        yield f"{place}: {len(lists)} of {max(worlds)} ranks have listed their files, of {len(names)} saves"
    yield from (
        f"{place}: rank {listed.rank} did not write everything: {listed.problem}" for listed in lists if listed.problem
    )


def find_damaged(place: Path, listed: FileList) -> Iterator[str]:
    """Yield a problem for each file of `listed` below `place` that is missing, has changed, or cannot be read."""
    for file, (size, sha256) in ((place / name, one) for name, one in listed.files.items()):
        try:
            if not file.is_file():
                yield f"{file} is missing"
            elif file.stat().st_size != size:
                yield f"{file} has {file.stat().st_size} bytes of {size}"
            elif digest(file) != sha256:
                yield f"{file} is damaged: its digest does not match"
        except OSError as error:
            yield f"{file} cannot be read: {error}"


def unlist_all(place: Path) -> None:
    """Remove all lists in the tag directory `place`, so that no process treats the rest as complete."""
    for file in list_paths(place):
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: a tag directory.

    Attributes:
        place: path of the tag directory.
        tag: path below the directory of checkpoints, such as "global_step10" or "epoch/1".
        step: optimizer step; None without readable lists.
        world: number of ranks; None without readable lists.
        size: total size of the files in bytes.
        time: newest modification time of the files.
        automatic: see `Save`.
        complete: True if all ranks have listed their files.
        problem: reason why the lists cannot be read; empty if they can.
    """

    place: Path
    tag: str
    step: int | None
    world: int | None
    size: int
    time: float
    automatic: bool
    complete: bool
    problem: str = ""

    @property
    def is_universal(self) -> bool:
        """True if DeepSpeed loads it with `checkpoint.load_universal` only."""
        return (self.place / "zero").is_dir()

    def remove(self) -> None:
        """Rename the checkpoint and then remove it, so that an interruption does not leave one that looks complete.

        Raises:
            OSError: nothing was removed.
        """
        gone = self.place.with_name(f"{_REMOVED}{self.place.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self.place, gone)
        shutil.rmtree(gone, ignore_errors=True)


def find_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints in `directory`, oldest first.

    Checkpoints without lists were written by DeepSpeed alone, and are treated as complete. A tag may have several parts
    ("epoch/1"). Symbolic links are ignored.
    """
    tags = (_read(place, place.relative_to(directory).as_posix()) for place in _tag_directories(directory))
    found = [checkpoint for checkpoint in tags if checkpoint is not None]
    return sorted(found, key=lambda one: (one.step is not None, one.step or 0, one.time))


def is_complete(place: Path) -> bool:
    """Return True if the tag directory `place` exists, and no rank's files are known to be missing there."""
    checkpoint = _read(place, place.name)
    return checkpoint is not None and checkpoint.complete


def subdirectories(directory: Path) -> list[Path]:
    """Return the subdirectories; [] if another process has removed `directory`, or it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return [Path(one.path) for one in entries if one.is_dir(follow_symlinks=False) and not is_removed(one)]
    except OSError:
        return []


def is_removed(place: Path | os.DirEntry[str]) -> bool:
    return place.name.startswith(_REMOVED)


def _tag_directories(directory: Path) -> Iterator[Path]:
    """Yield the directories below `directory` that hold states.

    The search does not enter such a directory, hidden directories, and those with their own `latest`, whose checkpoints
    do not belong to `directory`.
    """
    for place in subdirectories(directory):
        if _holds_states(place):
            yield place
        elif not place.name.startswith(".") and not (place / LATEST).exists():
            yield from _tag_directories(place)


def _holds_states(place: Path) -> bool:
    try:
        return any(name.endswith("_states.pt") or name.startswith(STEM) for name in os.listdir(place))
    except OSError:
        return False


def _read(place: Path, tag: str) -> Checkpoint | None:
    """Return the checkpoint in `place`, or None if it was removed meanwhile."""
    files: list[os.stat_result] = []
    for top, _, names in os.walk(place):
        for name in names:
            # Other processes may have removed or renamed a file meanwhile. It may also be a link to itself.
            with suppress(OSError):
                files.append(os.stat(os.path.join(top, name)))
    if not files:
        return None
    size, newest = sum(file.st_size for file in files), max(file.st_mtime for file in files)
    problem = ""
    lists: list[FileList] = []
    try:
        lists = read_lists(place)
    except StateError as error:
        problem = str(error)
    step, world, automatic = (lists[0].step, lists[0].world, lists[0].automatic) if lists else (None, None, False)
    complete = not problem and not any(_find_gaps(place, lists))
    return Checkpoint(place, tag, step, world, size, newest, automatic, complete, problem)
