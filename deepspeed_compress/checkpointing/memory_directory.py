"""Checkpoints in the memory of a host: a directory in `/dev/shm` that outlives the training processes.

It has the structure of one on disk: a directory per tag, with the files and lists of ranks (`completeness`). But a host
holds only the files of its own ranks, and copies of those of the previous host. Whether a checkpoint is complete is
therefore known only after all hosts were asked, and files that a host lacks are sent from another one.
"""

import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from deepspeed_compress.checkpointing import completeness
from deepspeed_compress.checkpointing.completeness import subdirectories
from deepspeed_compress.errors import StateError
from deepspeed_compress.launcher.heartbeat import MEMORY
from deepspeed_compress.safe_files import read_text, write_text

_SHARED_MEMORY = Path("/dev/shm")
_JOB = ".deepspeed_compress_job"
_KEPT = 2
"""Number of complete checkpoints to keep, since one may turn out to be damaged."""


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
    named = os.environ.get(MEMORY)
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
    lists: Mapping[int, completeness.FileList]

    @property
    def save(self) -> tuple[int, str, str, int]:
        """Return the identity of the save, equal on all hosts. Later saves compare greater."""
        first = next(iter(self.lists.values()))
        return (first.step, self.tag, first.run, first.number)

    @property
    def world(self) -> int:
        return next(iter(self.lists.values())).world


def find_host_saves(directory: Path) -> tuple[list[HostSave], list[str]]:
    """Return the saves in `directory`, and the problems of lists that cannot be read."""
    found: list[HostSave] = []
    problems: list[str] = []
    for place in sorted(subdirectories(directory)):
        lists: list[completeness.FileList] = []
        for file in completeness.list_paths(place):
            try:
                lists.append(completeness.read_list(file))
            except StateError as error:
                problems.append(str(error))
        whole = sorted((one for one in lists if not one.problem), key=lambda one: (one.run, one.number, one.rank))
        for _, some in groupby(whole, key=lambda one: (one.run, one.number)):
            found.append(HostSave(place.name, {one.rank: one for one in some}))
    return found, problems


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


@dataclass
class MemoryCatalog:
    """Numbers and tags of the checkpoints in memory that are still needed, and of those that were sent to other hosts.

    It is equal on all ranks without further communication.

    Attributes:
        copies: True if checkpoints are sent.
        written: all ranks have finished writing everything up to this number.
        copied: all ranks have finished sending everything up to this number.
    """

    copies: bool
    written: int = 0
    copied: int = 0
    _saved: list[tuple[int, str]] = field(default_factory=list)
    _sent: list[tuple[int, str]] = field(default_factory=list)

    def begin(self, number: int, tag: str) -> bool:
        """Register the checkpoint `number`, and return True if it should also be sent.

        It is not sent while another one is being sent.
        """
        self._saved.append((number, tag))
        send = self.copies and not self.sending
        if send:
            self._sent.append((number, tag))
        return send

    def ranks_agreed(self, written: int, copied: int) -> None:
        """Note an agreement of all ranks on what is written and copied."""
        self.written, self.copied = written, copied

    @property
    def sending(self) -> bool:
        """Return True if a copy is in progress, as far as all ranks know."""
        return any(number > self.copied for number, _ in self._sent)

    def mark_failed(self, number: int, of_copy: bool) -> None:
        """Remove the checkpoint `number`, whose writing or, if `of_copy`, sending failed.

        A checkpoint that was not written is not sent either.
        """
        self._sent = [one for one in self._sent if one[0] != number]
        if not of_copy:
            self._saved = [one for one in self._saved if one[0] != number]

    def restart_from(self, tag: str | None) -> None:
        """Restart from the checkpoint `tag`, which is complete in memory; None if training resumes from elsewhere."""
        self._saved = [] if tag is None else [(0, tag)]
        self._sent = list(self._saved) if self.copies else []

    def tags_to_keep(self) -> frozenset[str]:
        """Return the tags to keep.

        These are the newest two complete ones, the newest one whose copies have all arrived, and all that are in
        progress.
        """
        self._saved = _newest(self._saved, self.written, _KEPT)
        self._sent = _newest(self._sent, self.copied, 1)
        return frozenset(tag for _, tag in (*self._saved, *self._sent))


def _newest(found: Sequence[tuple[int, str]], ended: int, count: int) -> list[tuple[int, str]]:
    done = [one for one in found if one[0] <= ended]
    return done[-count:] + [one for one in found if one[0] > ended]
