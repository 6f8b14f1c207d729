"""PyTorch Lightning: changes to `DeepSpeedStrategy`, if its configuration has the section.

Lightning passes this configuration to `deepspeed.initialize`, and saves and loads with the methods of the engine, so
compression itself needs nothing more than `install`. The changes here report errors before a model is built, and keep
what the program does after training correct.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from deepspeed_compress.checkpointing.completeness import is_complete
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.integrations.patching import Undo, replace_method
from deepspeed_compress.integrations.sections import checked, has_section

if TYPE_CHECKING:
    from deepspeed_compress.session.session import Session

Method = Callable[..., Any]


def follow_strategy(strategy: type) -> Undo:
    """Change the methods of `strategy`, Lightning's `DeepSpeedStrategy`.

    Returns:
        A function that undoes this.
    """
    with ExitStack() as undo:
        for name, wrap in _CHANGES:
            undo.callback(replace_method(strategy, name, wrap))
        return undo.pop_all().close


def _checking(original: Method) -> Method:
    """Return a constructor that checks the section, and expands its parallelism, which Lightning reads."""

    def initialize(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if has_section(self.config):
            self.config, section = checked(self.config, "Lightning's training_step")
            if section.checkpointing is not None and section.checkpointing.directory is not None:
                raise UnsupportedError(_AUTOMATIC)

    return initialize


_AUTOMATIC = (
    f"/{SECTION}/checkpointing/directory: automatic checkpoints do not have the state of Lightning's loops, so a run "
    "that continues from one would repeat its batches (allowed: null). Remove directory and the keys that need it, use "
    "Lightning's ModelCheckpoint, and pass ckpt_path to Trainer.fit"
)


def _counting_processes(original: Method) -> Method:
    """Return a `setup_distributed` that refuses to wait for processes that were never started."""

    def setup_distributed(self: Any) -> None:
        started, expected = os.environ.get("WORLD_SIZE"), self.num_nodes * self.num_processes
        if SECTION in self.config and started is not None and int(started) != expected:
            raise ConfigError(
                f"the launcher has started {started} processes, but Lightning's Trainer expects {expected} (num_nodes "
                "x devices), and would wait for the others (allowed: the same number). Start them all with ds-compress "
                f"run --launcher torchrun --nproc_per_node {self.num_processes}"
            )
        original(self)

    return setup_distributed


def _completing(original: Method) -> Method:
    """Return a `remove_checkpoint` that keeps the older checkpoint unless the newer one was written. Collective."""

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        session = _session(self)
        _wait(session)
        if session is None or session.saving is None or session.last_saved is None or is_complete(session.last_saved):
            original(self, filepath)

    return remove_checkpoint


def _finishing(original: Method) -> Method:
    """Return an `on_train_end` that leaves exact weights and complete checkpoints. Collective."""

    def on_train_end(self: Any) -> None:
        session = _session(self)
        if session is not None:
            session.synchronise()
        _wait(session)
        original(self)

    return on_train_end


def _session(strategy: Any) -> "Session | None":
    # Not getattr: the engine forwards unknown names to the user's model.
    session: Session | None = vars(strategy.model).get("compression")
    return session


def _wait(session: "Session | None") -> None:
    if session is not None and session.saving is not None:
        session.saving.wait()


_CHANGES: tuple[tuple[str, Callable[[Method], Method]], ...] = (
    ("__init__", _checking),
    ("setup_distributed", _counting_processes),
    ("remove_checkpoint", _completing),
    ("on_train_end", _finishing),
)
"""Methods of `DeepSpeedStrategy`, each with the function that wraps it."""
