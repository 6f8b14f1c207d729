"""Settings of checkpoints that are written in the background: how often, and how many are kept."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed_compress.config.durations import ByteRate, Duration
from deepspeed_compress.config.methods import Model

__all__ = ["Checkpointing", "MemoryCheckpoints"]


class MemoryCheckpoints(Model):
    """Checkpoints in the memory of each host (`/dev/shm`), which outlive the training processes.

    The newest complete one is loaded instead of an older one in `directory`.
    """

    every: Annotated[int, Field(ge=1)] | Duration
    """Optimizer steps, or a time such as "30 s", after which one is saved."""
    copies: Literal[0, 1] = 0
    """Whether the files of a host also go into the memory of the next one, so that a host may be lost; 1 or 0."""
    max_rate: ByteRate | None = None
    """How fast each rank may send its files to the next host; null as fast as it goes."""


class Checkpointing(Model):
    """Checkpoints: `save_checkpoint` copies the state to memory, and another process writes it during training."""

    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written; false waits until it is whole."""
    every: Annotated[int, Field(ge=1)] | Duration | None = None
    """Optimizer steps, or a time such as "10 min", after which a checkpoint is saved without being asked for; null
    saves when the program does."""
    directory: Annotated[str, Field(min_length=1)] | None = None
    """Where checkpoints of `every` go; all hosts must share it."""
    resume: bool | None = None
    """Whether an engine goes on from the newest whole checkpoint in `directory` when it is made; null where
    `DS_COMPRESS_RESUME` is "1", which `ds-compress run --restarts` sets when it starts ranks again."""
    save_on_sigterm: bool | None = None
    """Whether SIGTERM has all ranks save in `directory` after the step, and end; null for ranks that `ds-compress run
    --restarts` has started."""
    keep: Annotated[int, Field(ge=1)] | None = None
    """How many of `every` are kept, the newest; null keeps all. Those that the program saves are never removed."""
    on_error: Literal["warn", "stop"] = "warn"
    """What follows when one could not be written, such as on a full disk: a warning, or an error on all ranks."""
    timeout: Duration = "10 min"
    """For which the first rank waits for the files of all others before a checkpoint counts as failed."""
    max_rate: ByteRate | None = None
    """How fast each rank may write DeepSpeed's files; null as fast as it goes."""
    memory: MemoryCheckpoints | None = None
    """Checkpoints in the memory of hosts beside those in `directory`, and more often; null saves none there."""
