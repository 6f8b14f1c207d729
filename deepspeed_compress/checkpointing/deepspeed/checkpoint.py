"""Compression state in checkpoints: a pair of files per rank (`state`), next to DeepSpeed's own.

One rank alone writes `client_state`, so state that differs between ranks needs separate files.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.backends.deepspeed.groups import find_position
from deepspeed_compress.backends.deepspeed.norms import loss_scale
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.checkpointing.completeness import unlist_all
from deepspeed_compress.checkpointing.deepspeed.participants import Loaded, LoadRequest, Participant, SaveRequest
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.compression import state
from deepspeed_compress.compression.state_description import Moment
from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.errors import CompressWarning, StateError
from deepspeed_compress.session.engine import BackgroundCheckpoints
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.state_files import (
    NOT_SAVED,
    Place,
    Write,
    load_state_files,
    result_on_all,
    save_state_files,
)


class CompressionState(Participant):
    """Participant that saves and loads the state of compression of `engine`, which `session` holds."""

    def __init__(self, engine: Any, session: Session) -> None:
        self._engine, self._session = engine, session

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Write the state. Weights are made exact first, so a resumed run equals one that continues."""
        session = self._session
        session.renew_weights()
        # DeepSpeed writes `latest` at the end, and every rank's state must be complete by then.
        write = partial(self._write, find_place(self._engine, session.config), request)
        result_on_all(write, problem=NOT_SAVED)
        yield request
        if not request.in_memory:
            # A guard must go back further than the last few steps, so checkpoints in memory do not count.
            session.checkpoint_saved(request.place)

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Drop what a failed backward pass has sent. Collective."""
        self._session.gradients.discard_unfinished()
        yield request

    def loaded(self, request: LoadRequest, found: Loaded | None) -> None:
        """Restore the state that belongs to the loaded weights, and begin the next step."""
        if found is None:
            return
        engine, session = self._engine, self._session
        session.residuals.clear()
        if request.loads_states:
            # In case the checkpoint does not name its run.
            session.journal.adopt(None)
            if _has_state(session):
                place, step = find_place(engine, session.config), engine.global_steps
                load_state_files(session, found.place, place, loss_scale(engine), step, found.save)
        session.renew_weights()
        session.journal.continue_from(engine.global_steps)
        session.begin(engine.global_steps, loss_scale(engine))

    def _write(self, place: Place, request: SaveRequest) -> None:
        engine, session, directory = self._engine, self._session, request.place
        if session.saving is None and not engine.global_rank:
            # The lists describe files that were written in the background and are now replaced.
            unlist_all(directory)
        if _has_state(session):
            stage = int(engine.zero_optimization_stage())
            moment = Moment(stage, engine.global_steps, loss_scale(engine), request.name)
            save_state_files(session, directory, place, moment, writing(session.saving))


def find_place(engine: Any, config: CompressConfig) -> Place:
    """Return the place of this rank's files. Collective.

    Each island within the job has its own directory, and numbers its ranks separately.
    """
    island = engine.mpu.ranks if isinstance(engine.mpu, IslandUnit) else None
    rank = engine.global_rank if island is None else island.index(engine.global_rank)
    return Place(rank, find_position(engine, config, island), engine.device)


def load_last(engine: Any) -> None:
    """Load the last complete checkpoint of this run, but keep the policy's later decisions. Collective.

    Without them the run would end up in the same state again. Warns if there is no checkpoint.

    Raises:
        StateError: no checkpoint is there and complete, or a save has failed and `on_error` is "stop". Raised on all
            ranks.
    """
    session: Session = engine.compression
    saved, decided = list(session.saved), session.policy.saved()
    if not saved:
        warnings.warn("there is no checkpoint to roll back to: none was saved yet", CompressWarning, stacklevel=2)
        return
    if session.saving is not None:
        session.saving.wait()
    for place in reversed(saved):
        if _loads(engine, place, is_last=place == saved[0]):
            break
    # The residuals belong to the settings that were in force when it was saved.
    now = session.policy.saved()
    session.policy.load({**decided, **{key: now[key] for key in ("settings", "step", "was_dense")}})
    session.begin(engine.global_steps, loss_scale(engine))


def _loads(engine: Any, place: Path, is_last: bool) -> bool:
    """Load the checkpoint in the tag directory `place`. Unless it `is_last`, return False if that is impossible.

    Collective: if some rank does not find the directory, it counts as missing on all ranks.
    """
    try:
        without = [rank for rank, found in enumerate(gather_objects(place.is_dir())) if not found]
        if without:
            raise StateError(
                f"/{SECTION}/guard/rollback/checkpoint: {place}, which this run has saved, does not exist on rank "
                f"{without[0]} (allowed: a directory that all ranks find); keep the last checkpoints until newer exist"
            )
        engine.load_checkpoint(str(place.parent), tag=place.name)
    except StateError as error:
        if is_last:
            raise
        warnings.warn(f"{error}; training rolls back to the checkpoint before", CompressWarning, stacklevel=3)
        return False
    return True


def _has_state(session: Session) -> bool:
    """Return True if there is any compression state to save."""
    return bool(session.residuals.by_name) or session.policy.observes or session.policy.auto is not None


def writing(saving: BackgroundCheckpoints | None) -> Write:
    """Return the function that writes state files: at once, or with the checkpoint that `saving` keeps."""
    return state.write if saving is None else saving.write_state
