"""One job at a time in a directory of checkpoints (`checkpoints.alone`), and one start of it (`checkpoints.claim`), as
all ranks of the job hear of it."""

from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from deepspeed_compress.checkpoints.alone import hold
from deepspeed_compress.checkpoints.claim import Claim, this_start
from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.session.memories import on_all_ranks

__all__ = ["alone_in", "start_of_all"]


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
