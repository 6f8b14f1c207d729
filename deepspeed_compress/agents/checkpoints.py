"""Checkpoints between batches of rollouts, from which a killed run continues."""

import os
from pathlib import Path
from typing import Any

from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.errors import StateError


class Checkpoints:
    """Saves the engine of a policy after some batches of rollouts, and loads it at the start of a resumed run.

    Make it before the weights are published for the first time. All ranks make it, and call its methods.

    Args:
        engine: the DeepSpeed engine of the policy.
        directory: directory for the checkpoints, which all ranks share.
        every: number of batches from one checkpoint to the next.
        resume: True to continue from the newest checkpoint, or to start if there is none.

    Attributes:
        batches: number of batches that the engine had learned from when its checkpoint was saved; 0 for a new run.

    Raises:
        StateError: the directory has checkpoints but `resume` is False, or the newest one is not of such a run.
    """

    def __init__(self, engine: Any, directory: str | os.PathLike[str], every: int = 10, resume: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every is {every} (allowed: 1 or more)")
        self._engine, self._directory, self._every = engine, Path(directory), every
        # A shared directory may show new files to other hosts later.
        exists = of_first((self._directory / "latest").exists())
        if exists and not resume:
            raise StateError(
                f"{self._directory} has checkpoints of an earlier run: write resume=True to continue it, or name "
                "another directory"
            )
        self.batches = self._load() if exists else 0

    def _load(self) -> int:
        path, state = self._engine.load_checkpoint(str(self._directory))
        if path is None or "batches" not in state:
            raise StateError(f"the newest checkpoint in {self._directory} does not tell its number of batches")
        return int(state["batches"])

    def save_if_due(self, batches: int, last: bool) -> None:
        """Save after batch number `batches`, if it is a multiple of `every` or the last one. Collective."""
        if last or batches % self._every == 0:
            self._engine.save_checkpoint(str(self._directory), tag=f"batch{batches}", client_state={"batches": batches})
