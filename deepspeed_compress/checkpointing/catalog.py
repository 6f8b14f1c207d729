"""Catalog of the checkpoints in a directory: finding them, naming the latest one, and removing old ones."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.checkpointing.completeness import STEM, Save, read_lists
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import read_text, write_text

LATEST = "latest"


_LONGEST_TAG = 1024


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
    """Reason why the lists cannot be read; empty if they can."""

    @property
    def is_universal(self) -> bool:
        """True if DeepSpeed loads it with `checkpoint.load_universal` only."""
        return (self.place / "zero").is_dir()


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints in `directory`, oldest first.

    Checkpoints without lists were written by DeepSpeed alone, and are treated as complete. A tag may have several parts
    ("epoch/1"). Symbolic links are ignored.
    """
    tags = (_checkpoint(place, place.relative_to(directory).as_posix()) for place in _tag_directories(directory))
    found = [one for one in tags if one is not None]
    return sorted(found, key=lambda one: (one.step is not None, one.step or 0, one.time))


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


def subdirectories(directory: Path) -> list[Path]:
    """Return the subdirectories; [] if another process has removed `directory`, or it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return [Path(one.path) for one in entries if one.is_dir(follow_symlinks=False) and not _is_removed(one)]
    except OSError:
        return []


def _holds_states(place: Path) -> bool:
    try:
        return any(name.endswith("_states.pt") or name.startswith(STEM) for name in os.listdir(place))
    except OSError:
        return False


def _files(place: Path) -> Iterator[os.stat_result]:
    """Yield the status of all files below `place`, while other processes may write, rename and remove files there."""
    for top, _, names in os.walk(place):
        for name in names:
            # A file may have been removed meanwhile, or be a link to itself.
            with suppress(OSError):
                yield os.stat(os.path.join(top, name))


def _checkpoint(place: Path, tag: str) -> Checkpoint | None:
    """Return the checkpoint in `place`, or None if it was removed meanwhile."""
    files = list(_files(place))
    if not files:
        return None
    size, time = sum(file.st_size for file in files), max(file.st_mtime for file in files)
    try:
        lists = read_lists(place)
    except StateError as error:
        return Checkpoint(place, tag, None, None, size, time, automatic=False, complete=False, problem=str(error))
    if not lists:
        return Checkpoint(place, tag, None, None, size, time, automatic=False, complete=True)
    first = lists[0]
    alike = all(
        (one.run, one.number, one.world, one.problem) == (first.run, first.number, first.world, "") for one in lists
    )
    complete = alike and len(lists) == first.world
    return Checkpoint(place, tag, first.step, first.world, size, time, first.automatic, complete)


def is_complete(place: Path) -> bool:
    """Return True if the tag directory `place` exists, and no rank's files are known to be missing there."""
    found = _checkpoint(place, place.name)
    return found is not None and found.complete


def tags_to_try(directory: Path) -> list[str]:
    """Return the tags to load: the one that `latest` names, then older complete ones, newest first.

    Empty without `latest`. Universal checkpoints are not among the older ones, because they are loaded in another way.
    """
    named = latest_tag(directory)
    if named is None:
        return []
    tags = [one.tag for one in checkpoints(directory) if one.tag == named or (one.complete and not one.is_universal)]
    before = tags[: tags.index(named)] if named in tags else tags
    return [named, *reversed(before)]


def publish(save: Save) -> None:
    """Let `latest` name this save, unless `save.latest` is False."""
    if save.latest:
        write_text(save.directory / LATEST, save.tag)


def latest_tag(directory: Path, name: str = LATEST) -> str | None:
    """Return the tag that the file `name` in `directory` names, or None if there is no such file.

    Raises:
        StateError: it cannot be read, or its content cannot be the name of a directory.
    """
    latest = directory / name
    if not latest.is_file():
        return None
    try:
        tag = read_text(latest, 4 * _LONGEST_TAG).strip()
    except (OSError, ValueError) as error:
        raise StateError(f"{latest} is damaged ({error!r})") from error
    if not tag or len(tag.encode()) > _LONGEST_TAG or not tag.isprintable():
        raise StateError(f"{latest} is damaged: it names {tag[:60]!r} (allowed: the name of a directory next to it)")
    return tag


def prune(directory: Path, keep: int) -> list[str]:
    """Remove the automatic checkpoints that are superfluous, and return their tags.

    Raises:
        StateError: some cannot be removed. All others are.
    """
    for left in filter(_is_removed, directory.iterdir()):
        shutil.rmtree(left, ignore_errors=True)
    automatic = [found for found in checkpoints(directory) if found.automatic]
    removed: list[str] = []
    problems: list[str] = []
    for found in superfluous(directory, automatic, keep):
        try:
            remove(found)
            removed.append(found.tag)
        except OSError as error:
            problems.append(f"{found.place} cannot be removed: {error}")
    if problems:
        raise StateError("; ".join(problems))
    return removed


def protected(directory: Path) -> frozenset[str]:
    """Return the tags in `directory` that must not be removed: those that `latest` or a symbolic link names."""
    linked = (place.resolve() for place in directory.iterdir() if place.is_symlink())
    top = directory.resolve()
    tags = {place.relative_to(top).as_posix() for place in linked if place.is_relative_to(top)}
    latest = latest_tag(directory)
    return frozenset(tags if latest is None else {*tags, latest})


def superfluous(directory: Path, found: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return those of `found`, oldest first, that may be removed, unless they are protected.

    These are the complete ones except for the newest `keep`, and the incomplete ones before `latest`: saves of one run
    end in order, so no process still writes them. Checkpoints with unreadable lists are not in order, and stay.
    """
    tags, complete, latest = [one.tag for one in found], [one for one in found if one.complete], latest_tag(directory)
    before = found[: tags.index(latest)] if latest in tags else ()
    abandoned = [one for one in before if not one.complete and not one.problem]
    kept = protected(directory)
    return [one for one in (*complete[: max(0, len(complete) - keep)], *abandoned) if one.tag not in kept]


def remove(found: Checkpoint) -> None:
    """Rename the checkpoint and then remove it, so that an interruption does not leave one that looks complete.

    Raises:
        OSError: nothing was removed.
    """
    gone = found.place.with_name(f"{_REMOVED}{found.place.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(found.place, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _is_removed(place: Path | os.DirEntry[str]) -> bool:
    return place.name.startswith(_REMOVED)
