"""Placement of checkpoints in host memory, as one rank sees it: their directory, and the host that has copies of them.

Ranks that see the same directory are on one host. The first of them is its leader: only the leader removes outdated
files, receives copies, and sends files that another host lacks.
"""

import json
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.groups import destroy_groups
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_copies import Destination, Receiver
from deepspeed_compress.checkpointing.memory_directory import MemoryCatalog, job_directory, job_name
from deepspeed_compress.checkpointing.writer import Task
from deepspeed_compress.collectives.objects import gather_objects, of_first
from deepspeed_compress.config.models import MemoryCheckpoints
from deepspeed_compress.config.numbers import byte_rate
from deepspeed_compress.errors import CompressWarning, StateError
from deepspeed_compress.launcher.heartbeat import HOSTS, MEMORY
from deepspeed_compress.session.state_files import result_on_all
from deepspeed_compress.transport.client import own_address

T = TypeVar("T")

_KEY = "/deepspeed_compress/checkpointing/memory"


@dataclass(frozen=True)
class Hosts:
    """Ranks grouped by host.

    Attributes:
        ranks: the ranks of each host, in the order of their first ranks.
        here: the index of this rank's host.
    """

    ranks: tuple[tuple[int, ...], ...]
    here: int

    @property
    def leaders(self) -> list[int]:
        return [ranks[0] for ranks in self.ranks]

    @property
    def ours(self) -> tuple[int, ...]:
        return self.ranks[self.here]


class HostMemory:
    """Checkpoint directory in the memory of this host, with copies on the next host. Construction is collective.

    Args:
        settings: the section's `checkpointing.memory`.
        disk: the directory of checkpoints on disk, which identifies the job.
        start: the name of this start of the job, which claims the directory.
        group: all ranks, with gloo.

    Raises:
        StateError: a rank could not get its own directory. Raised on all ranks.
    """

    def __init__(self, settings: MemoryCheckpoints, disk: Path, start: str, group: ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank()
        self._disk = disk.resolve()
        job = self._from_first(lambda: job_name(self._disk))
        self.directory = self._on_all(lambda: job_directory(job))
        self.hosts = self._find_hosts()
        self._on_all(lambda: CheckpointDirectory(self.directory, start).claim() if self.leads else None)
        self.leaders = dist.new_group(self.hosts.leaders, backend="gloo")
        """Group of the leaders. Other ranks are not in it."""
        self.catalog = MemoryCatalog(copies=bool(settings.copies) and len(self.hosts.ranks) > 1)
        self._receiver: Receiver | None = None
        try:
            self._destination = self._begin_receiving(settings) if self.catalog.copies else None
        except BaseException:
            self.close()
            raise
        if settings.copies and not self.catalog.copies:
            what = f"{settings.copies} has no effect, because all ranks are on one host (allowed: 0)"
            warnings.warn(f"{_KEY}/copies: {what}; remove it", CompressWarning, stacklevel=2)

    @property
    def leads(self) -> bool:
        """Return True if this rank is the first of its host."""
        return self._rank == self.hosts.ours[0]

    def is_of(self, directory: str | Path) -> bool:
        """Return True if the checkpoints in memory belong to the job that saves in `directory`."""
        return Path(directory).resolve() == self._disk

    def task(self, task: Task) -> Task:
        """Return `task` with the additional work for memory: the tags to keep, and the destination of a copy."""
        send = self.catalog.begin(task.save.number, task.save.tag)
        only = self.catalog.tags_to_keep() if self.leads else None
        return replace(task, only=only, copy=self._destination if send else None)

    def close(self) -> None:
        """Stop receiving copies, leave the group of leaders, and remove the directory.

        It stays after an exception, so that what can be loaded is not lost. It also stays if `DS_COMPRESS_MEMORY_DIR`
        names it, because its creator then removes it.
        """
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        destroy_groups([self.leaders])
        failed = sys.exception() is not None or getattr(sys, "last_value", None) is not None
        if self.leads and not failed and MEMORY not in os.environ:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _from_first(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the first rank. Collective."""
        return of_first(self._on_all(lambda: [work()] if self._rank == 0 else []), self._group)[0]

    def _on_all(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank. Collective.

        Raises:
            StateError: `work` failed on some rank. Raised on all ranks.
        """
        return result_on_all(work, self._group, f"{_KEY}: ")

    def _find_hosts(self) -> Hosts:
        seen = self.directory.stat()
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        found = gather_objects((machine, seen.st_dev, seen.st_ino), self._group)
        ranks = tuple(tuple(rank for rank, one in enumerate(found) if one == host) for host in dict.fromkeys(found))
        return Hosts(ranks, next(here for here, some in enumerate(ranks) if self._rank in some))

    def _begin_receiving(self, settings: MemoryCheckpoints) -> Destination:
        """Start receivers on the leaders, and return the destination for copies of this rank's files. Collective."""
        key = self._from_first(lambda: secrets.token_bytes(32))
        self._receiver = self._on_all(lambda: Receiver(self.directory, key) if self.leads else None)
        own = (self._on_all(self._address), 0 if self._receiver is None else self._receiver.port)
        # The next host keeps copies of this host's files.
        leader = self.hosts.leaders[(self.hosts.here + 1) % len(self.hosts.ranks)]
        address, port = gather_objects(own, self._group)[leader]
        rate = None if settings.max_rate is None else byte_rate(settings.max_rate)
        return Destination(address, port, key, rate)

    def _address(self) -> str:
        named = os.environ.get(HOSTS)
        if named is None:
            return own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        hosts = json.loads(named)
        if len(hosts) != len(self.hosts.ranks):
            raise StateError(f"{HOSTS} lists {len(hosts)} hosts, but the ranks see {len(self.hosts.ranks)} directories")
        return str(hosts[self.hosts.here])
