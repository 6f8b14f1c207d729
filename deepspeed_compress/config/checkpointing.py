"""Settings of checkpoints that are written in the background."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed_compress.config.durations import ByteRate, Duration
from deepspeed_compress.config.methods import Model


class MemoryCheckpoints(Model):
    """Checkpoints in the memory of each host (`/dev/shm`), which outlive the training processes.

    The newest complete one is loaded instead of an older one in `directory`.
    """

    every: Annotated[int, Field(ge=1)] | Duration
    """Interval between checkpoints in memory: a number of optimizer steps, or a time such as "30 s"."""
    copies: Literal[0, 1] = 0
    """Number of copies of each host's files in the memory of the next host. With 1, one host may be lost."""
    max_rate: ByteRate | None = None
    """Largest rate at which each rank sends its files to the next host; null has no limit."""


class Checkpointing(Model):
    """Checkpoints: `save_checkpoint` copies the state to memory, and another process writes it during training."""

    asynchronous: bool = True
    """Continue training while a checkpoint is written; false waits until it is complete."""
    every: Annotated[int, Field(ge=1)] | Duration | None = None
    """Interval between automatic checkpoints: a number of optimizer steps, or a time such as "10 min"; null saves only
    when the program calls `save_checkpoint`."""
    directory: Annotated[str, Field(min_length=1)] | None = None
    """Directory of automatic checkpoints, which all hosts must share."""
    resume: bool | None = None
    """Load the newest complete checkpoint of `directory` when the engine is created. null does so only if the
    environment variable `DS_COMPRESS_RESUME` is 1, which `ds-compress run --restarts` sets when it restarts ranks."""
    save_on_sigterm: bool | None = None
    """On SIGTERM, finish the step, save a checkpoint in `directory`, and end all ranks. null does so only for ranks
    that `ds-compress run --restarts` has started."""
    keep: Annotated[int, Field(ge=1)] | None = None
    """Number of automatic checkpoints to keep, the newest ones; null keeps all. Checkpoints that the program saves are
    never removed."""
    on_error: Literal["warn", "stop"] = "warn"
    """Reaction if a checkpoint cannot be written, for example on a full disk: `warn`, or `stop` with an error on all
    ranks."""
    timeout: Duration = "10 min"
    """Time that the first rank waits for the files of all other ranks before a checkpoint counts as failed."""
    max_rate: ByteRate | None = None
    """Largest rate at which each rank writes DeepSpeed's files in the background; null has no limit."""
    memory: MemoryCheckpoints | None = None
    """More frequent checkpoints in the memory of the hosts, in addition to `directory`; null saves none."""
