"""Duties of ranks that an agent has started: they send heartbeats, and continue from the newest checkpoint."""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
        session.saving.listen((lambda saves: None) if heartbeat is None else heartbeat.saves)
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
        _resume(engine, session, session.saving, settings.directory)
    elif settings.resume is None and started and of_first((Path(settings.directory) / LATEST).exists()):
        raise ConfigError(
            f"/deepspeed_compress/checkpointing/directory: {settings.directory} already has checkpoints, and this job "
            'would continue from them after a restart; write a directory without any, or "resume": true'
        )


def _resume(engine: Any, session: Session, saving: BackgroundCheckpoints, directory: str) -> None:
    newest: AbstractContextManager[Any] = nullcontext()
    if engine.load_universal_checkpoint():
        newest = universal_if_newest(engine, Path(directory), saving.newest_step(directory))
    with newest:
        path, client_state = engine.load_checkpoint(directory)
    if path is None:
        return
    if AGENT in os.environ and engine.global_rank == 0:
        print(_continuing(Path(path), Path(directory), int(engine.global_steps)), file=sys.stderr, flush=True)
    session.training_resumed(client_state or {})


def _continuing(path: Path, directory: Path, steps: int) -> str:
    """Return the line that says from which checkpoint this start continues, and how many steps it repeats."""
    last = read_latest(Path(os.environ[AGENT]).parent.glob("*/rank_*"))
    repeated = max(0, (0 if last is None else last.steps) - steps)
    place = path.parent if path.is_file() else path
    # In the memory of hosts there are only checkpoints of `every`, whose tags have one part.
    tag = place.relative_to(directory).as_posix() if place.is_relative_to(directory) else place.name
    return f"ds-compress: continuing from {tag} ({repeated} steps repeated)"
