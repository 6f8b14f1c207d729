"""One job at a time in a directory of checkpoints (`checkpoints.alone`), and one start of it (`checkpoints.claim`), as
all ranks of the job hear of it; and one of the islands that live."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from deepspeed_compress.checkpoints.alone import hold, in_turn
from deepspeed_compress.checkpoints.claim import Claim, this_start
from deepspeed_compress.checkpoints.files import replace_text
from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.session.memories import on_all_ranks

__all__ = ["alone_in", "start_of_all", "take_for_island"]

_ISLAND = "deepspeed_compress_island.json"
"""In a directory of checkpoints: which island they are of."""


def alone_in(directory: str | None, start: str) -> TextIO | None:
    """The lock of the directory of checkpoints that nobody asks for, on the first rank, which is claimed for `start`.
    Collective: ConfigError on all ranks where another job saves there."""
    held: list[TextIO | None] = []
    if directory is None:
        return None
    problem = on_all_ranks(lambda: held.append(None if dist.get_rank() else _lock(directory, start)))
    if problem:
        raise ConfigError(problem)
    return held[0]


def start_of_all() -> str:
    """The name of this start of the job. Collective."""
    named = [this_start()]
    dist.broadcast_object_list(named, src=0)
    return named[0]


def _lock(directory: str, start: str) -> TextIO | None:
    """None where nothing can be written there: that is the matter of each checkpoint."""
    try:
        held = hold(Path(directory))
    except OSError:
        return None
    if held is None:
        raise StateError(
            f"/deepspeed_compress/checkpointing/directory: {directory}: another job that runs now saves its "
            "checkpoints there (allowed: one at a time); write another directory"
        )
    with suppress(OSError):
        Claim(Path(directory), start).take()
    return held


def take_for_island(directory: Path, run: str | None, number: int, others: Collection[int]) -> None:
    """Checkpoints in `directory` are of island `number` of `run` from now on. StateError where they are of one of the
    `others`, which live: they would overwrite each other's files."""
    directory.mkdir(parents=True, exist_ok=True)
    with in_turn(directory):
        found = _island_of(directory / _ISLAND)
        if found.get("run") == run and found["number"] in others:
            raise StateError(
                f"{directory} is where island {found['number']} saves, and this is island {number} (allowed: one "
                "directory for each); give save_checkpoint, or output_dir of Trainer, another one on every island"
            )
        replace_text(directory / _ISLAND, json.dumps({"run": run, "number": number}))


def _island_of(file: Path) -> Mapping[str, Any]:
    """Empty where nobody has saved, or it cannot be read: it is written anew then."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {"run": found["run"], "number": int(found["number"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
