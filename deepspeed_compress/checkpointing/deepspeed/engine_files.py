"""DeepSpeed's files: its `checkpoint_engine`, which gets every file that an engine saves, and the reading of one.

DeepSpeed's `save_checkpoint` passes every file to `engine.checkpoint_engine` (runtime/checkpoint_engine). Ours keeps
the contents, and a separate process writes them (`writer`). It declares itself decoupled, so that DeepSpeed does
not write the file `latest`; the writer does so once the files of all ranks exist.

Files are written past the page cache. They are hashed while they are written, and then renamed. The processors that
train would also have to allocate, fill and write back pages of the cache. Past the cache (open(2), O_DIRECT), the disk
reads the data itself, and hashing each block before it is written avoids reading the file again. File systems without
support for this are written through the cache.
"""

import errno
import fcntl
import hashlib
import io
import mmap
import os
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.snapshot import Call, Snapshot
from deepspeed_compress.errors import StateError, UnsupportedError
from deepspeed_compress.safe_files import open_regular, temporary

_BLOCK = 1 << 20
"""Number of bytes written at a time. They fit into a processor's cache between their copy and their digest."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """Checkpoint whose files are being kept.

    Attributes:
        snapshot: keeps the calls that write them.
        directory: its directory, with the claim of this start.
        rate: bytes per second at which they are written; None for no limit.
        in_memory: True if they are written to host memory.
    """

    snapshot: Snapshot
    directory: CheckpointDirectory
    rate: float | None
    in_memory: bool


class EngineFiles(TorchCheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """Files of one engine: those of the checkpoint `open` are kept, and others are written immediately.

    Args:
        clean_up: called when the engine is destroyed.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        super().__init__()
        self.open: OpenCheckpoint | None = None
        self._clean_up = clean_up

    def is_decoupled(self) -> bool:
        """Return True, so that DeepSpeed does not write the file `latest`."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: every tensor is written separately, so DeepSpeed need not copy tensors that share a buffer."""
        return False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the checkpoint is already open."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory. A failure is ignored here, and reported to all ranks as a failed checkpoint."""
        with suppress(OSError):
            super().makedirs(path, exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file of the open checkpoint; write it immediately if none is open (`save_16bit_model`).

        The program waits for such an export, so `max_rate` would only prolong it.
        """
        if self.open is None:
            write_torch(state_dict, Path(path), None)
            return
        arguments = (state_dict, Path(path), self.open.rate, self.open.directory.held)
        self.open.snapshot.add(Call(write_torch, arguments, (Path(path),)))

    def copy_script(self, original: Callable[[str], None], save_path: str) -> None:
        """Run DeepSpeed's `_copy_recovery_script`, for checkpoints on disk only. A full disk costs only the script."""
        if self.open is None or not self.open.in_memory:
            with suppress(OSError):
                original(save_path)

    def cleanup(self) -> None:
        """Clean up, because DeepSpeed destroys the engine."""
        self._clean_up()


def check_saving(engine: Any) -> None:
    """Check that DeepSpeed saves in a way that can be done in the background.

    Raises:
        UnsupportedError: it does not.
    """
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise UnsupportedError(
            f"/deepspeed_compress/checkpointing cannot be combined with {type(engine.checkpoint_engine).__name__} "
            "(allowed: DeepSpeed's default checkpoint engine); remove the key, or checkpoint.writer and nebula"
        )
    if engine.use_node_local_storage() or engine.zero_nvme_offload_optimizer():
        raise UnsupportedError(
            "/deepspeed_compress/checkpointing cannot be combined with use_node_local_storage or an optimizer on NVMe "
            "(allowed: one directory with the files of all ranks); remove one of the two keys"
        )


def read_states(file: Path) -> dict[str, Any]:
    """Return the contents of a file, unpickled as DeepSpeed does, with tensors that are memory-mapped.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        # Reading a pipe would wait for its writer.
        open_regular(file).close()
        states: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"{file} is missing or damaged ({error})") from error
    return states


def write_torch(
    state: Any, path: Path, max_rate: float | None, held: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Mapping[Path, str]:
    """Write `state` to `path` by `torch.save`, and return the SHA-256 of the file.

    It is written under a temporary name, which is renamed while `held()` is entered, at no more than `max_rate` bytes
    per second. Removes what writers that were killed have left of the same file.
    """
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    scratch = temporary(path)
    try:
        with DirectFile(scratch, max_rate) as stream:
            torch.save(state, cast(IO[bytes], stream))
            sha256 = stream.finish()
        with held():
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return {path: sha256}


class DirectFile(io.RawIOBase):
    """A new file at `path`, written sequentially. Raises OSError as `open` and `os.write` do.

    Args:
        path: path of the file, which is replaced.
        max_rate: bytes per second; None for no limit.
    """

    def __init__(self, path: Path, max_rate: float | None = None) -> None:
        super().__init__()
        self._descriptor = _opened(path)
        # Whole pages, page-aligned, as O_DIRECT requires.
        self._block = mmap.mmap(-1, _BLOCK)
        self._filled = self._written = 0
        self._digest = hashlib.sha256()
        self._rate, self._begun = max_rate, time.monotonic()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all bytes of `data` and return their number. They are on the disk after `finish`."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            part, left = left[: _BLOCK - self._filled], left[_BLOCK - self._filled :]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == _BLOCK:
                self._write_block()
        return size

    def finish(self) -> str:
        """Flush everything to the disk and return its SHA-256 in hexadecimal."""
        if self._filled:
            self._write_block()
        if os.fstat(self._descriptor).st_size != self._written:
            os.ftruncate(self._descriptor, self._written)
        os.fsync(self._descriptor)
        return self._digest.hexdigest()

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _write_block(self) -> None:
        """Write the collected bytes. Past the cache, whole pages are written, and `finish` truncates the file."""
        page = mmap.PAGESIZE if self._is_direct() else 1
        whole = memoryview(self._block)
        self._digest.update(whole[: self._filled])
        self._put(whole[: -(-self._filled // page) * page])
        self._written, self._filled = self._written + self._filled, 0
        if self._rate is not None:
            time.sleep(max(0.0, self._begun + self._written / self._rate - time.monotonic()))

    def _put(self, left: memoryview) -> None:
        while left:
            try:
                written = os.write(self._descriptor, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct():
                    raise
                written = 0
            left = left[written:]
            if written % mmap.PAGESIZE or not written:
                # The disk requires larger blocks, or wrote a part of a page: continue through the cache.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _opened(path: Path, direct: int = os.O_DIRECT) -> int:
    # A new file: a link of this name is not followed.
    path.unlink(missing_ok=True)
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        return _opened(path, 0)
