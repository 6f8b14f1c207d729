"""Exclusive use of a checkpoint directory by one job, one start of the job, and one running island, for all ranks.

See `directory_lock` for the lock and `claim` for the start of a job.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from deepspeed_compress.checkpointing.claim import Claim, this_start
from deepspeed_compress.checkpointing.completeness import replace_text
from deepspeed_compress.checkpointing.directory_lock import hold, in_turn
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.session.state_files import result_on_all

_ISLAND = "deepspeed_compress_island.json"
"""File in a checkpoint directory that names the island to which it belongs."""
_ENGINE = ".deepspeed_compress_engine"
"""File in a checkpoint directory that names the engine that has last begun to save there automatically."""


def alone_in(directory: str | None, start: str) -> TextIO | None:
    """Lock the directory of automatic checkpoints on the first rank, and claim it for `start`. Collective.

    Returns:
        The lock, on the first rank; None on other ranks, without a directory, or if nothing can be written there.

    Raises:
        ConfigError: another job saves there. Raised on all ranks.
    """
    if directory is None:
        return None
    try:
        return result_on_all(lambda: None if dist.get_rank() else _lock(directory, start))
    except StateError as error:
        raise ConfigError(str(error)) from None


def check_only_engine(directory: Path, engine: str, has_saved: bool) -> None:
    """Check that only `engine` saves automatically in `directory`. Collective.

    The first save of an engine takes the directory over, since an earlier engine of the program may be out of use.

    Args:
        directory: the directory of automatic checkpoints.
        engine: unique name of the engine.
        has_saved: True if the engine has saved there automatically.

    Raises:
        ConfigError: another engine has saved there since. Raised on all ranks.
    """
    try:
        result_on_all(lambda: None if dist.get_rank() else _check_only_engine(directory / _ENGINE, engine, has_saved))
    except StateError as error:
        raise ConfigError(str(error)) from None


def _check_only_engine(file: Path, engine: str, has_saved: bool) -> None:
    # If the directory was removed, or nothing can be written there, the checkpoint itself reports it.
    with suppress(OSError):
        if not has_saved:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, engine)
        elif file.read_bytes() != engine.encode():
            raise StateError(
                f"/deepspeed_compress/checkpointing/directory: {file.parent}: another engine of this program saves its "
                "checkpoints there, too, and they overwrite each other's (allowed: one directory per engine); write "
                "another directory into the configuration of one of them"
            )


def start_of_all() -> str:
    """Return the name of this start of the job, which is the same on all ranks. Collective."""
    return gather_objects(this_start())[0]


def _lock(directory: str, start: str) -> TextIO | None:
    """Lock `directory` and claim it for `start`.

    Returns None if nothing can be written there; each checkpoint reports that itself.

    Raises:
        StateError: another job holds the lock.
    """
    try:
        held = hold(Path(directory))
    except OSError:
        return None
    if held is None:
        raise StateError(
            f"/deepspeed_compress/checkpointing/directory: {directory}: another running job saves its "
            "checkpoints there (allowed: one job at a time); write another directory"
        )
    with suppress(OSError):
        Claim(Path(directory), start).take()
    return held


def take_for_island(directory: Path, run: str | None, number: int, others: Collection[int]) -> None:
    """Reserve `directory` for the checkpoints of island `number` of `run`.

    Args:
        directory: the directory of checkpoints; it is created if necessary.
        run: the run of the islands.
        number: the number of this island.
        others: the numbers of the other islands that are running.

    Raises:
        StateError: the directory belongs to one of `others`. They would overwrite each other's files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with in_turn(directory):
        found = _island_of(directory / _ISLAND)
        if found.get("run") == run and found["number"] in others:
            raise StateError(
                f"island {found['number']} saves in {directory}, and this is island {number} (allowed: one "
                "directory per island); give save_checkpoint, or Trainer's output_dir, a different directory on every "
                "island"
            )
        replace_text(directory / _ISLAND, json.dumps({"run": run, "number": number}))


def _island_of(file: Path) -> Mapping[str, Any]:
    """Return the run and number of the island in `file`.

    Empty if the file is missing or unreadable; it is then rewritten.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {"run": found["run"], "number": int(found["number"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
