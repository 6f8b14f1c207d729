"""Checkpoints of Hugging Face Trainer whose files were written in the background, and which of them are complete."""

import json
import zipfile
from itertools import takewhile
from pathlib import Path

import torch.distributed as dist

from deepspeed_compress.checkpointing.catalog import is_complete, latest_tag
from deepspeed_compress.errors import StateError


def newest_complete_checkpoint(output: Path) -> str | None:
    """Return Trainer's newest complete checkpoint in `output`; None if there is none. All ranks get rank 0's answer."""
    found = [_newest(output) if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def count_incomplete(output: Path) -> int:
    """Return the number of Trainer's checkpoints in `output` that are newer than its newest complete one."""
    return len([*takewhile(lambda folder: not _is_complete(folder), _folders(output))])


def _newest(output: Path) -> str | None:
    return next((str(folder) for folder in _folders(output) if _is_complete(folder)), None)


def _folders(output: Path) -> list[Path]:
    """Return the folders of Trainer's checkpoints in `output`, newest first."""
    folders = [one for one in output.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")), reverse=True)


def _is_complete(folder: Path) -> bool:
    """Return True unless a file is missing, or cut off as Trainer's own ones may be after a crash of their host."""
    try:
        tag = latest_tag(folder)
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, StateError, ValueError):
        return False
    whole = all(map(zipfile.is_zipfile, folder.glob("*.pt*")))
    return whole and tag is not None and is_complete(folder / tag)
