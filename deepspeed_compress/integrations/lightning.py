"""PyTorch Lightning: changes to `DeepSpeedStrategy`, if its configuration has the section.

Lightning passes this configuration to `deepspeed.initialize`, and saves and loads with the methods of the engine, so
compression itself needs nothing more than `install`. The changes here report errors before a model is built, and keep
what the program does after training correct.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed_compress.checkpointing.completeness import is_complete
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.integrations.patching import Undo, replace_methods
from deepspeed_compress.integrations.sections import checked, has_section

if TYPE_CHECKING:
    from deepspeed_compress.session.session import Session

Method = Callable[..., Any]


def follow_strategy(strategy: type) -> Undo:
    """Change the methods of `strategy`, Lightning's `DeepSpeedStrategy`.

    Returns:
        A function that undoes this.
    """
    return replace_methods(
        (strategy, "__init__", _checking),
        (strategy, "setup_distributed", _counting_processes),
        (strategy, "remove_checkpoint", _completing),
        (strategy, "on_train_end", _finishing),
    )


def _checking(original: Method, self: Any, *args: Any, **options: Any) -> None:
    """Make a strategy, check its section, and expand the parallelism in it, which Lightning reads."""
    original(self, *args, **options)
    if has_section(self.config):
        self.config, section = checked(self.config, "Lightning's training_step")
        if section.checkpointing is not None and section.checkpointing.directory is not None:
            raise UnsupportedError(_AUTOMATIC)


_AUTOMATIC = (
    f"/{SECTION}/checkpointing/directory: automatic checkpoints do not have the state of Lightning's loops, so a run "
    "that continues from one would repeat its batches (allowed: null). Remove directory and the keys that need it, use "
    "Lightning's ModelCheckpoint, and pass ckpt_path to Trainer.fit"
)


def _counting_processes(original: Method, self: Any) -> None:
    """Run `setup_distributed`, but refuse to wait for processes that were never started."""
    started, expected = os.environ.get("WORLD_SIZE"), self.num_nodes * self.num_processes
    if SECTION in self.config and started is not None and int(started) != expected:
        raise ConfigError(
            f"the launcher has started {started} processes, but Lightning's Trainer expects {expected} (num_nodes "
            "x devices), and would wait for the others (allowed: the same number). Start them all with ds-compress "
            f"run --launcher torchrun --nproc_per_node {self.num_processes}"
        )
    original(self)


def _completing(original: Method, self: Any, filepath: Any) -> None:
    """Run `remove_checkpoint`, but keep the older checkpoint unless the newer one was written. Collective."""
    session = _session(self)
    _wait(session)
    if session is None or session.saving is None or not session.saved or is_complete(session.saved[-1]):
        original(self, filepath)


def _finishing(original: Method, self: Any) -> None:
    """Run `on_train_end`, and leave exact weights and complete checkpoints. Collective."""
    session = _session(self)
    if session is not None:
        session.synchronise()
    _wait(session)
    original(self)


def _session(strategy: Any) -> "Session | None":
    # Not getattr: the engine forwards unknown names to the user's model.
    session: Session | None = vars(strategy.model).get("compression")
    return session


def _wait(session: "Session | None") -> None:
    if session is not None and session.saving is not None:
        session.saving.wait()
