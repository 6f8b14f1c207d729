"""A directory of checkpoints: who may change it, what it holds, how a save becomes the latest, and what is removed.

A start of a job claims the directory. Writer processes outlive their ranks, possibly for long on a busy machine because
of their low priority, and their remaining work must not interfere with the files of the ranks that follow, which save
the same tags again. Whatever a save changes is therefore changed while its claim is held.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.checkpointing import completeness
from deepspeed_compress.checkpointing.completeness import (
    LATEST,
    Checkpoint,
    FileList,
    Save,
    find_checkpoints,
    is_removed,
    subdirectories,
)
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import lock, read_text, write_text

_CLAIM = ".deepspeed_compress_start"
_START_LENGTH = 32
_LONGEST_TAG = 1024
_PAUSE, _PAUSE_PER_RANK = 0.05, 0.002
"""Seconds between looks at the lists of all ranks. Hundreds of lists load a file server."""


def this_start() -> str:
    """Return a name that is unique to this process on all machines. A start of a job is named by its first rank."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # The fields after the name of the program, which may contain anything. The 22nd field is the start time.
    begun = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return hashlib.sha256(f"{machine} {os.getpid()} {begun}".encode()).hexdigest()[:_START_LENGTH]


@dataclass(frozen=True)
class CheckpointDirectory:
    """Directory of checkpoints. Those who only read it need no claim.

    Attributes:
        path: the directory.
        start: name of the start of the job that changes it; see `this_start`.
        claimed: place of the claim: a tag directory if other jobs may save next to it; None for `path`.
    """

    path: Path
    start: str = ""
    claimed: Path | None = None

    # The claim.

    def claim(self) -> None:
        """Take over the directory. Afterwards, no process of another start changes anything.

        Raises:
            OSError: the directory cannot be written.
        """
        descriptor = os.open(self._claim_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not self._is_ours(descriptor):
                os.pwrite(descriptor, self.start.encode(), 0)
                # Other processes notice it at their next file. Wait for those that are about to rename one.
                lock(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the claim while files are renamed or removed. Without any claim, no process is excluded.

        On a file system without locks, the check of a claim may be outdated by one file.

        Raises:
            StateError: a later start has taken the directory.
        """
        try:
            descriptor = os.open(self._claim_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            # The directory was removed meanwhile, or is a different one on this host.
            yield
            return
        try:
            lock(descriptor, shared=True)
            if not self._is_ours(descriptor):
                raise StateError(
                    f"{self._claim_file.parent}: another start of the job has claimed it: a later one, or an earlier "
                    "one if this one could not write there"
                )
            yield
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Check that the claim still holds; raises StateError if not."""
        with self.held():
            pass

    @property
    def _claim_file(self) -> Path:
        return (self.claimed or self.path) / _CLAIM

    def _is_ours(self, descriptor: int) -> bool:
        return os.pread(descriptor, _START_LENGTH, 0) == self.start.encode()

    # A save, from its first file until `latest` names it.

    def begin(self, save: Save, rank: int, only: Collection[str] | None = None) -> None:
        """Write a list of `rank` that says that its files are unfinished, before any of them is replaced.

        The first rank also removes the lists that a save with more ranks has left. If `only` is given, all other tags
        are removed, except for later ones.

        Raises:
            OSError: the tag directory does not exist, or cannot be written.
            StateError: a later start has taken the directory.
        """
        with self.held():
            if only is not None:
                self.keep_only(save, only)
            completeness.write_list(save.place, completeness.unfinished(completeness.listed(save, rank, {})))
            if not rank:
                ours = {completeness.list_file(save.place, other) for other in range(save.world)}
                for file in set(completeness.list_paths(save.place)) - ours:
                    file.unlink(missing_ok=True)

    def finish(self, save: Save, rank: int, digests: Mapping[Path, str]) -> FileList:
        """Write the list of the files that `rank` has written, given their SHA-256, and return it."""
        listed = completeness.listed(save, rank, digests)
        with self.held():
            completeness.write_list(save.place, listed)
        return listed

    def fail(self, save: Save, rank: int, written: Iterable[Path], problem: str) -> None:
        """Remove what `rank` has written, and write a list with the `problem`, as far as possible."""
        with suppress(OSError, StateError), self.held():
            # The list needs room on a full disk, and so do later saves.
            _remove_files(written)
            # Spare the rank that waits for all lists from waiting for this one.
            completeness.write_list(save.place, completeness.listed(save, rank, {}, problem))

    def publish(self, save: Save, patience: float = 0.0) -> None:
        """Let `latest` name the save, unless `save.latest` is False, once all ranks have listed their files.

        Raises:
            StateError: `patience` seconds have elapsed, a rank has failed, or a later start has taken the directory.
        """
        deadline = time.monotonic() + patience
        while missing := self.missing(save):
            self.check()
            if time.monotonic() > deadline:
                raise StateError(
                    f"{save.place}: ranks {missing} have not listed their files in {patience:.0f} s; do all hosts "
                    "share this directory?"
                )
            time.sleep(_PAUSE + _PAUSE_PER_RANK * save.world)
        if save.latest:
            with self.held():
                write_text(self.path / LATEST, save.tag)

    def missing(self, save: Save) -> list[int]:
        """Return the ranks that have not yet listed their files of `save`, or of a later one that replaces it.

        Raises:
            StateError: a rank has failed to write its files, or the tag directory was removed.
        """
        missing: list[int] = []
        if not save.place.is_dir():
            raise StateError(f"{save.place} could not be created, or was removed before everything was written")
        for rank in range(save.world):
            file = completeness.list_file(save.place, rank)
            listed = completeness.read_list(file) if file.is_file() else None
            if listed is None or listed.run != save.run or listed.number < save.number or listed.is_unfinished:
                missing.append(rank)
            elif listed.problem:
                raise StateError(f"{save.place}: rank {rank}: {listed.problem}")
        return missing

    def tidy(self, save: Save, keep: int | None) -> None:
        """Remove what the complete `save` makes superfluous; `keep` automatic checkpoints stay, or all if None.

        Raises:
            StateError: some cannot be removed. All others are.
        """
        with self.held():
            self._remove_unlisted(save)
            if keep is not None:
                self.prune(keep)

    def _remove_unlisted(self, save: Save) -> None:
        """Remove states that an earlier save of the same tag, by other ranks, has left. DeepSpeed would count them.

        If a later save of the tag has begun, its files are not listed yet, and nothing is removed.
        """
        lists = completeness.read_lists(save.place)
        if {(listed.run, listed.number, listed.problem) for listed in lists} != {(save.run, save.number, "")}:
            return
        known = {name for listed in lists for name in listed.files}
        for file in save.place.glob("*mp_rank_*_states.pt"):
            if file.name not in known:
                file.unlink(missing_ok=True)

    def discard(self, save: Save) -> None:
        """Remove what all ranks have written of a save that some of them have failed to write.

        Nothing is removed if every rank that has listed its files has written them: the hosts may not share the
        directory. The lists stay, and say that the checkpoint is incomplete, if there are other files, or if the
        program has named the tag, which it may be about to save again.
        """
        with self.held():
            lists = completeness.read_lists(save.place)
            lists = [listed for listed in lists if (listed.run, listed.number) == (save.run, save.number)]
            if lists and not any(listed.problem for listed in lists):
                return
            _remove_files(save.place / name for listed in lists for name in listed.files)
            if save.automatic and set(save.place.iterdir()) <= set(completeness.list_paths(save.place)):
                completeness.unlist_all(save.place)
                save.place.rmdir()

    # What the directory holds.

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        return find_checkpoints(self.path)

    def latest_tag(self, name: str = LATEST) -> str | None:
        """Return the tag that the file `name` names, or None if there is no such file.

        Raises:
            StateError: it cannot be read, or its content cannot be the name of a directory.
        """
        file = self.path / name
        if not file.is_file():
            return None
        try:
            tag = read_text(file, 4 * _LONGEST_TAG).strip()
        except (OSError, ValueError) as error:
            raise StateError(f"{file} is damaged ({error!r})") from error
        if not tag or len(tag.encode()) > _LONGEST_TAG or not tag.isprintable():
            raise StateError(f"{file} is damaged: it names {tag[:60]!r} (allowed: the name of a directory next to it)")
        return tag

    def tags_to_try(self) -> list[str]:
        """Return the tags to load: the one that `latest` names, then older complete ones, newest first.

        Empty without `latest`. Universal checkpoints are not among the older ones: they are loaded in another way.
        """
        named = self.latest_tag()
        if named is None:
            return []
        tags = [
            checkpoint.tag
            for checkpoint in self.checkpoints()
            if checkpoint.tag == named or (checkpoint.complete and not checkpoint.is_universal)
        ]
        before = tags[: tags.index(named)] if named in tags else tags
        return [named, *reversed(before)]

    # Removal of old checkpoints.

    def prune(self, keep: int) -> list[str]:
        """Remove the automatic checkpoints that are superfluous, and return their tags.

        Raises:
            StateError: some cannot be removed. All others are.
        """
        for left in filter(is_removed, self.path.iterdir()):
            shutil.rmtree(left, ignore_errors=True)
        removed: list[str] = []
        problems: list[str] = []
        for checkpoint in self.superfluous([one for one in self.checkpoints() if one.automatic], keep):
            try:
                checkpoint.remove()
                removed.append(checkpoint.tag)
            except OSError as error:
                problems.append(f"{checkpoint.place} cannot be removed: {error}")
        if problems:
            raise StateError("; ".join(problems))
        return removed

    def protected(self) -> frozenset[str]:
        """Return the tags that must not be removed: those that `latest` or a symbolic link names."""
        top, latest = self.path.resolve(), self.latest_tag()
        linked = (place.resolve() for place in self.path.iterdir() if place.is_symlink())
        tags = {place.relative_to(top).as_posix() for place in linked if place.is_relative_to(top)}
        return frozenset(tags if latest is None else {*tags, latest})

    def superfluous(self, found: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
        """Return those of `found`, oldest first, that may be removed, unless they are protected.

        These are the complete ones except for the newest `keep`, and the incomplete ones before `latest`: saves of one
        run end in order, so no process still writes them. Checkpoints with unreadable lists are not in order, and stay.
        """
        tags, complete, latest = [one.tag for one in found], [one for one in found if one.complete], self.latest_tag()
        before = found[: tags.index(latest)] if latest in tags else ()
        abandoned = [one for one in before if not one.complete and not one.problem]
        kept = self.protected()
        return [one for one in (*complete[: max(0, len(complete) - keep)], *abandoned) if one.tag not in kept]

    def keep_only(self, save: Save, tags: Collection[str]) -> None:
        """Remove all tags except for `tags` and those after `save`, which faster ranks may have begun to write.

        Ignores files that other processes have removed or still write.
        """
        for place in subdirectories(self.path):
            if place.name not in tags and not _may_be_later(place, save):
                completeness.unlist_all(place)
                shutil.rmtree(place, ignore_errors=True)


def _remove_files(written: Iterable[Path]) -> None:
    for file in written:
        with suppress(OSError):
            file.unlink()


def _may_be_later(place: Path, save: Save) -> bool:
    """Return True if `place` has a list of a save after `save`, or no list, as before the first file of such a save."""
    paths = completeness.list_paths(place)
    with suppress(StateError):
        lists = map(completeness.read_list, paths)
        return not paths or any(listed.run == save.run and listed.number > save.number for listed in lists)
    return False
