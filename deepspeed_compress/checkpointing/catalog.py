"""Catalog of the checkpoints in a directory, as they are while other processes write and remove some."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.checkpointing.completeness import STEM, read_lists
from deepspeed_compress.errors import StateError

LATEST = "latest"
_REMOVED = ".deepspeed_compress_removed_"
"""Prefix of the tag of a checkpoint that is being removed."""


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
    files = list(_files(place))
    if not files:
        return None
    size, newest = sum(file.st_size for file in files), max(file.st_mtime for file in files)
    try:
        lists = read_lists(place)
    except StateError as error:
        return Checkpoint(place, tag, None, None, size, newest, automatic=False, complete=False, problem=str(error))
    if not lists:
        return Checkpoint(place, tag, None, None, size, newest, automatic=False, complete=True)
    first = lists[0]
    alike = {(one.run, one.number, one.world, one.problem) for one in lists} == {
        (first.run, first.number, first.world, "")
    }
    complete = alike and len(lists) == first.world
    return Checkpoint(place, tag, first.step, first.world, size, newest, first.automatic, complete)


def _files(place: Path) -> Iterator[os.stat_result]:
    """Yield the status of all files below `place`, while other processes may write, rename and remove files there."""
    for top, _, names in os.walk(place):
        for name in names:
            # A file may have been removed meanwhile, or be a link to itself.
            with suppress(OSError):
                yield os.stat(os.path.join(top, name))
