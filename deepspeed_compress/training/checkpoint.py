"""Saving a run and resuming it exactly.

DeepSpeed's checkpoint holds weights, optimizer and schedule; deepspeed_compress adds its residuals to it. Of
the program itself only the step number matters, since (seed, step) say what is read; the rest of the state is
kept to refuse a resume that could not be exact.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.training.ranks import Ranks

STATE = "train_gpt"
DIRECTORY = "checkpoints"


@dataclass(frozen=True)
class Identity:
    """What must not change between the parts of one run; names are those of the command line."""

    seed: int
    seq_len: int
    held_out: float
    data: str
    train_batch_size: int


def save(engine: Any, output_dir: Path, identity: Identity) -> None:
    """Write checkpoint `global_step<N>` below `output_dir`. Every rank must call this."""
    engine.save_checkpoint(str(output_dir / DIRECTORY), client_state={STATE: vars(identity)})


def resume(engine: Any, output_dir: Path, identity: Identity, ranks: Ranks) -> int:
    """Load the newest checkpoint and return its step; 0 when there is none.

    Raises ConfigError when the options differ from those that the checkpoint was made with.
    """
    if not ranks.first_only((output_dir / DIRECTORY / "latest").is_file):
        return 0
    _, state = engine.load_checkpoint(str(output_dir / DIRECTORY))
    ranks.first_only(lambda: _check((state or {}).get(STATE), identity))
    return int(engine.global_steps)


def _check(saved: dict[str, Any] | None, identity: Identity) -> None:
    if saved is None:
        raise ConfigError("--resume: the checkpoint was not written by this program; choose another --output-dir")
    changed = [
        f"{name} was {saved[name]}, is {value}" for name, value in vars(identity).items() if saved[name] != value
    ]
    if changed:
        raise ConfigError(f"--resume cannot go on exactly: {'; '.join(changed)}; restore it, or start a new run")
