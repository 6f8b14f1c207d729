"""Checkpoints with files of random bytes, as the ranks of a job would write them."""

import random
from pathlib import Path

from deepspeed_compress.checkpointing.completeness import LATEST, Save, digest
from deepspeed_compress.checkpointing.directory import CheckpointDirectory

WORLD = 2


def save(directory: Path, step: int, **options: object) -> Save:
    """Return a save of `WORLD` ranks in `directory`, of which nothing is written yet."""
    return Save(directory, f"global_step{step}", "run", step, step, WORLD, **options)


def write(one: Save, ranks: tuple[int, ...] = (0, 1)) -> Save:
    """Write the files of `ranks` with their lists, and return the save."""
    one.place.mkdir(parents=True, exist_ok=True)
    directory = CheckpointDirectory(one.directory)
    for rank in ranks:
        directory.begin(one, rank)
        file = one.place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file.write_bytes(random.Random(f"{one.number}{rank}").randbytes(3000))
        directory.finish(one, rank, {file: digest(file)})
    return one


def publish(one: Save) -> None:
    """Let `latest` name the save, whatever is written of it."""
    (one.directory / LATEST).write_text(one.tag)
