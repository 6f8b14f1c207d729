"""DeepSpeed's files: its `checkpoint_engine`, which gets every file that an engine saves, and the reading of one.

DeepSpeed's `save_checkpoint` passes every file to `engine.checkpoint_engine` (runtime/checkpoint_engine). Ours keeps
the contents, and a separate process writes them (`writer`). It declares itself decoupled, so that DeepSpeed does
not write the file `latest`; the writer does so once the files of all ranks exist.
"""

import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_compress.checkpointing.direct import write_torch
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.snapshot import Call, Snapshot
from deepspeed_compress.errors import StateError, UnsupportedError
from deepspeed_compress.safe_files import open_regular


class _Scripts:
    """Stand-in for an engine, with what DeepSpeed needs to copy its recovery script next to checkpoints."""

    _copy_recovery_script = DeepSpeedEngine._copy_recovery_script
    _change_recovery_script_permissions = DeepSpeedEngine._change_recovery_script_permissions


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
        """Have the writer process run DeepSpeed's `_copy_recovery_script`, for checkpoints on disk only."""
        if self.open is None:
            original(save_path)
        elif not self.open.in_memory:
            self.open.snapshot.add(Call(_Scripts()._copy_recovery_script, (save_path,), ()))

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
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("/deepspeed_compress/checkpointing requires Linux (memfd_create); remove the key")
    if engine.use_node_local_storage() or engine.zero_nvme_offload_optimizer():
        raise UnsupportedError(
            "/deepspeed_compress/checkpointing cannot be combined with use_node_local_storage or an optimizer on NVMe, "
            "because their files are not all in one directory (allowed: one directory for all ranks); remove "
            "one of the two keys"
        )


def read_states(file: Path) -> dict[str, Any]:
    """Return the contents of a file, unpickled as DeepSpeed does, with tensors that are memory-mapped if possible.

    It is impossible in torch's older format, which DeepSpeed writes with `"checkpoint_serialization": false`.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        with open_regular(file) as stream:
            can_map = zipfile.is_zipfile(stream)
        states: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=can_map)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"{file} is missing or damaged ({error})") from error
    return states
