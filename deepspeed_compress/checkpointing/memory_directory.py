"""Checkpoints in the memory of a host: a directory in `/dev/shm` that outlives the training processes.

It has the structure of one on disk: a directory per tag, with the files and lists of ranks (`completeness`). But a host
holds only the files of its own ranks, and copies of those of the previous host. Whether a checkpoint is complete is
therefore known only after all hosts were asked, and files that a host lacks are sent from another one.
"""

import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deepspeed_compress.checkpointing import completeness
from deepspeed_compress.checkpointing.catalog import subdirectories
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import read_text, write_text

ENVIRONMENT = "DS_COMPRESS_MEMORY_DIR"
"""Environment variable with the directory, for systems that create it and remove it at the end of the job."""
_SHARED_MEMORY = Path("/dev/shm")
_JOB = ".deepspeed_compress_job"


def job_name(directory: Path) -> str:
    """Return the name of the job whose checkpoints on disk are in `directory`, from a file there.

    The file is created if it does not exist, so removing the directory starts a new job.

    Raises:
        StateError: the file can neither be read nor created, or is damaged.
    """
    file = directory / _JOB
    try:
        if not file.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            write_text(file, uuid.uuid4().hex)
        found = read_text(file).strip()
    except (OSError, ValueError) as error:
        raise StateError(f"{file}, which names the job, can neither be read nor written: {error}") from error
    if re.fullmatch("[0-9a-f]{32}", found) is None:
        raise StateError(f"{file} is damaged: remove it to start checkpoints in memory afresh")
    return found


def job_directory(job: str) -> Path:
    """Return the directory of this host for the checkpoints of `job` in memory. Only this user can read it.

    Raises:
        StateError: another user has created it, or has access to it.
    """
    named = os.environ.get(ENVIRONMENT)
    base = Path(named).absolute() if named else _SHARED_MEMORY / f"deepspeed_compress_{os.getuid()}"
    for place in (base, base / job):
        _make_private(place)
    return base / job


def _make_private(place: Path) -> None:
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError as error:
        raise StateError(f"{place}, for checkpoints in memory, cannot be created: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StateError(
            f"{place}, for checkpoints in memory, is not private to this user (allowed: a directory of mode 0700); "
            "remove it"
        )


@dataclass(frozen=True)
class HostSave:
    """The lists that a host holds of one save, by rank. The files may still be damaged."""

    tag: str
    run: str
    number: int
    step: int
    world: int
    lists: Mapping[int, completeness.FileList]

    @property
    def save(self) -> tuple[int, str, str, int]:
        """Return the identity of the save, equal on all hosts. Later saves compare greater."""
        return (self.step, self.tag, self.run, self.number)


def find_host_saves(directory: Path) -> tuple[list[HostSave], list[str]]:
    """Return the saves in `directory`, and the problems of lists that cannot be read."""
    found: list[HostSave] = []
    problems: list[str] = []
    for place in sorted(subdirectories(directory)):
        lists = sorted(_readable(place, problems), key=lambda one: (one.run, one.number, one.rank))
        for (run, number), some in groupby(lists, key=lambda one: (one.run, one.number)):
            by_rank = {one.rank: one for one in some}
            first = next(iter(by_rank.values()))
            found.append(HostSave(place.name, run, number, first.step, first.world, by_rank))
    return found, problems


def _readable(place: Path, problems: list[str]) -> Iterator[completeness.FileList]:
    for file in completeness.list_paths(place):
        try:
            listed = completeness.read_list(file)
        except StateError as error:
            problems.append(str(error))
            continue
        if not listed.problem:
            yield listed


def keep_only(save: completeness.Save, tags: Iterable[str]) -> None:
    """Remove all tags next to `save` except for `tags` and later ones, which faster ranks may have begun to write.

    Ignores files that other processes have removed or still write.
    """
    for place in subdirectories(save.directory):
        if place.name not in tags and not _may_be_later(place, save):
            completeness.unlist_all(place)
            shutil.rmtree(place, ignore_errors=True)


def _may_be_later(place: Path, save: completeness.Save) -> bool:
    """Return True if `place` has a list of a save after `save`, or no list, as before the first file of such a save."""
    paths = completeness.list_paths(place)
    with suppress(StateError):
        return not paths or any(
            one.run == save.run and one.number > save.number for one in map(completeness.read_list, paths)
        )
    return False


@dataclass(frozen=True)
class Missing:
    """A file of the tag directory that host `source` has and the hosts `needed_by` lack.

    `listed` is the list of the rank that wrote it.
    """

    name: str
    listed: completeness.FileList
    source: int
    needed_by: tuple[int, ...]


def missing_files(
    lists: Mapping[int, completeness.FileList], whole: Iterable[frozenset[int]], ranks: Iterable[frozenset[int]]
) -> Iterator[Missing]:
    """Yield the files that must be sent between hosts before all ranks can load.

    Args:
        lists: lists of all ranks.
        whole: for each host, the ranks whose files it has, undamaged. Each rank must be in one of them.
        ranks: for each host, the ranks that run there.
    """
    hosts = list(zip(whole, ranks, strict=True))
    for rank, listed in sorted(lists.items()):
        source = next(host for host, (held, _) in enumerate(hosts) if rank in held)
        lacking = {host: here for host, (held, here) in enumerate(hosts) if rank not in held}
        for name in sorted(listed.files):
            needed_by = tuple(host for host, here in lacking.items() if rank in here or _is_for_all(name))
            if needed_by:
                yield Missing(name, listed, source, needed_by)


def _is_for_all(name: str) -> bool:
    """Return True if other ranks read the file too.

    Files with fp32 master weights and residuals are read only by the rank that wrote them.
    """
    masters = "zero_pp_rank_" in name and name.endswith("_optim_states.pt")
    return not masters and not name.startswith(("deepspeed_compress_rank_", "deepspeed_compress_islands_rank_"))
