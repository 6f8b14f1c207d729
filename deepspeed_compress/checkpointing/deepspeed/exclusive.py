"""Exclusive use of a checkpoint directory by one job, one start of the job, and one engine, for all ranks.

See `safe_files.hold` for the job, and `CheckpointDirectory.claim` for its start.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.safe_files import hold, open_regular, write_text
from deepspeed_compress.session.state_files import result_on_all

_ENGINE = ".deepspeed_compress_engine"
"""File in a checkpoint directory that names the engine that has last begun to save there automatically."""


class ExclusiveDirectory:
    """Exclusive use of the directory of automatic checkpoints by one job, one start of it, and one engine.

    The first rank holds it. If nothing can be written there, as on a full disk, each save tries again.

    Args:
        directory: the directory; None without automatic checkpoints.
        start: name of this start of the job.
        engine: unique name of the engine.

    Raises:
        ConfigError: another job saves there. Raised on all ranks.
    """

    def __init__(self, directory: Path | None, start: str, engine: str) -> None:
        self._directory = None if directory is None or dist.get_rank() else CheckpointDirectory(directory, start)
        self._engine = engine.encode()
        self._lock: TextIO | None = None
        self._is_claimed = self._is_named = False
        self.problem = ""
        """Why the first rank cannot hold the directory now; each checkpoint reports it."""
        if directory is not None:
            _on_all(self._take)

    def take_again(self) -> None:
        """Take what could not be taken before. If another job has taken it since, its claim makes our saves fail."""
        with suppress(StateError):
            self._take()

    def check_only_engine(self) -> None:
        """Check that no other engine has saved there automatically since this one has. Collective.

        The first save of an engine takes the directory over, since an earlier engine of the program may be out of use.

        Raises:
            ConfigError: another engine has saved there since. Raised on all ranks.
        """
        _on_all(self._check_only_engine)

    def close(self) -> None:
        """Release the directory for other jobs."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        if self._directory is None:
            return
        try:
            self._lock = self._lock or hold(self._directory.path)
            if self._lock is None:
                raise StateError(
                    f"/deepspeed_compress/checkpointing/directory: {self._directory.path}: another running job saves "
                    "its checkpoints there (allowed: one job at a time); write another directory"
                )
            if not self._is_claimed:
                self._directory.claim()
                self._is_claimed = True
            self.problem = ""
        except OSError as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _check_only_engine(self) -> None:
        if self._directory is None:
            return
        file = self._directory.path / _ENGINE
        with suppress(OSError):
            if not self._is_named:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, self._engine.decode())
                self._is_named = True
                return
            with open_regular(file) as stream:
                named = stream.read(len(self._engine) + 1)
            if named != self._engine:
                raise StateError(
                    f"/deepspeed_compress/checkpointing/directory: {file.parent}: another engine of this program saves "
                    "its checkpoints there, too (allowed: one directory per engine); write another for one of them"
                )


def _on_all(work: Callable[[], None]) -> None:
    try:
        result_on_all(work)
    except StateError as error:
        raise ConfigError(str(error)) from None
