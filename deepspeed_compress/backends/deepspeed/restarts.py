"""Duties of ranks that an agent has started: they send heartbeats, and continue from the newest checkpoint."""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.checkpointing.completeness import LATEST
from deepspeed_compress.checkpointing.deepspeed.resharding import universal_if_newest
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.errors import CompressWarning, ConfigError
from deepspeed_compress.launcher.heartbeat import AGENT, RESUME, HeartbeatWriter, read_latest
from deepspeed_compress.session.engine import BackgroundCheckpoints
from deepspeed_compress.session.session import Session


def attach_heartbeat(engine: Any, session: Session) -> None:
    """Send a heartbeat after each optimizer step and before each forward pass, if an agent has started this rank.

    From now on this rank saves on SIGTERM, and the agent is told so. Otherwise it would wait for a rank that waits for
    a lost one.
    """
    directory = os.environ.get(AGENT)
    heartbeat = None if directory is None else HeartbeatWriter(Path(directory), engine.global_rank)
    if session.saving is not None:
        session.saving.listen(_tell_nobody if heartbeat is None else heartbeat.saves)
    if heartbeat is None:
        return
    if heartbeat.problem:
        text = (
            f"the agent receives no heartbeat of rank {engine.global_rank}, so it notices no hang, and a restart "
            f"begins at step 0: {heartbeat.problem}; free the memory of {directory}"
        )
        warnings.warn(text, CompressWarning, stacklevel=3)
    session.patches.on_undo(heartbeat.close)
    session.patches.wrap(engine, "_take_model_step", partial(_step, engine, heartbeat))
    handle = engine.module.register_forward_pre_hook(lambda module, inputs: heartbeat.beat())
    session.patches.on_undo(handle.remove)


def _tell_nobody(saves: bool) -> None:
    """Do nothing, because no agent has started this rank."""


def _step(engine: Any, heartbeat: HeartbeatWriter, take: Callable[..., Any], *args: Any, **options: Any) -> None:
    heartbeat.beat()
    take(*args, **options)
    heartbeat.stepped(int(engine.global_steps))


def resume_newest(engine: Any, session: Session) -> None:
    """Load the newest checkpoint into a new engine, if resuming is requested. Collective.

    With `checkpoint.load_universal`, that is a universal checkpoint until the run has saved newer ones.

    Raises:
        ConfigError: the directory has checkpoints of another job.
        StateError: no checkpoint is complete.
    """
    settings = session.config.checkpointing
    again, started = os.environ.get(RESUME) == "1", AGENT in os.environ
    if settings is None or session.saving is None or settings.directory is None:
        if again and started and (settings is None or settings.resume is None) and engine.global_rank == 0:
            text = (
                "/deepspeed_compress/checkpointing: there are no automatic checkpoints, so training restarts at step 0 "
                'unless the program loads a checkpoint; write {"every": "10 min", "directory": ...}'
            )
            warnings.warn(text, CompressWarning, stacklevel=3)
    elif settings.resume or (settings.resume is None and again):
        path, client_state = _load_newest(engine, session.saving, settings.directory)
        if path is not None and started and engine.global_rank == 0:
            print(
                _continuing(Path(path), Path(settings.directory), int(engine.global_steps)), file=sys.stderr, flush=True
            )
        if path is not None:
            session.training_resumed(client_state or {})
    elif settings.resume is None and started:
        _refuse_others(Path(settings.directory))


def _load_newest(engine: Any, saving: BackgroundCheckpoints, directory: str) -> Any:
    """Return what `load_checkpoint` returns."""
    if not engine.load_universal_checkpoint():
        return engine.load_checkpoint(directory)
    with universal_if_newest(engine, Path(directory), saving.newest_step(directory)):
        return engine.load_checkpoint(directory)


def _continuing(path: Path, directory: Path, steps: int) -> str:
    """Return the line that says from which checkpoint this start continues, and how many steps it repeats."""
    last = read_latest(Path(os.environ[AGENT]).parent.glob("*/rank_*"))
    repeated = max(0, (0 if last is None else last.steps) - steps)
    place = path.parent if path.is_file() else path
    # In the memory of hosts there are only checkpoints of `every`, whose tags have one part.
    tag = place.relative_to(directory).as_posix() if place.is_relative_to(directory) else place.name
    return f"ds-compress: continuing from {tag} ({repeated} steps repeated)"


def _refuse_others(directory: Path) -> None:
    """Refuse a directory with checkpoints of another job: this job would continue from them after a restart."""
    if of_first((directory / LATEST).exists()):
        raise ConfigError(
            f"/deepspeed_compress/checkpointing/directory: {directory} already has checkpoints, and this job would "
            'continue from them after a restart (allowed: a directory without checkpoints, or "resume": '
            "true); write one of the two"
        )
