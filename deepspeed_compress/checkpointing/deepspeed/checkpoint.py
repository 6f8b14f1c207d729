"""Compression state in checkpoints: a pair of files per rank (`state`), next to DeepSpeed's own.

One rank alone writes `client_state`, so state that differs between ranks needs separate files.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.backends.deepspeed.division import IslandUnit
from deepspeed_compress.backends.deepspeed.groups import find_position
from deepspeed_compress.backends.deepspeed.norms import loss_scale
from deepspeed_compress.checkpointing.completeness import unlist_all
from deepspeed_compress.checkpointing.deepspeed.background import BackgroundSaving, check_saving
from deepspeed_compress.checkpointing.deepspeed.resharding import other_size
from deepspeed_compress.checkpointing.deepspeed.tags import tag_of
from deepspeed_compress.checkpointing.snapshot import Call
from deepspeed_compress.compression import state
from deepspeed_compress.config import Checkpointing
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.session.beside import Saving
from deepspeed_compress.session.memories import Place, load_memories, save_memories, save_on_all
from deepspeed_compress.session.session import Session

__all__ = ["attach_checkpoint", "load_last", "load_state"]


def attach_checkpoint(engine: Any, session: Session) -> None:
    """Wrap `save_checkpoint` and `load_checkpoint` of this engine. Their signatures stay the same.

    Weights are made exact before saving, so that saved weights are exact and a resumed run equals one that continues.
    """
    session.patches.wrap(engine, "save_checkpoint", partial(_save, engine, session))
    session.patches.wrap(engine, "load_checkpoint", partial(_load, engine, session))
    if session.config.checkpointing is not None:
        _save_in_background(engine, session, session.config.checkpointing)


def _save_in_background(engine: Any, session: Session, settings: Checkpointing) -> None:
    check_saving(engine)
    saving = session.saving = BackgroundSaving(engine, settings)
    session.patches.on_undo(saving.cleanup)
    session.patches.replace(engine, "checkpoint_engine", saving)
    session.patches.wrap(engine, "save_checkpoint", saving.save_checkpoint)
    session.patches.wrap(engine, "load_checkpoint", saving.load_checkpoint)
    session.patches.wrap(engine, "_copy_recovery_script", saving.copy_script)


def _save(engine: Any, session: Session, save: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(save).bind(*args, **options).arguments
    if not given["save_dir"]:
        # DeepSpeed reports the problem before it writes anything.
        return save(*args, **options)
    directory = Path(given["save_dir"]).absolute() / tag_of(engine, given.get("tag"))
    session.renew_weights()
    # DeepSpeed writes `latest` at the end, and every rank's state must be complete by then.
    save_on_all(partial(_save_state, engine, _place(engine), directory))
    saved = save(*args, **options)
    session.last_saved = directory
    return saved


def _load(engine: Any, session: Session, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(load).bind(*args, **options).arguments
    states = bool(given.get("load_optimizer_states", True) and not given.get("load_module_only", False))
    models = find_position(engine, session.config, _island(engine)).groups
    session.discard_unfinished()
    with other_size(engine, Path(given["load_dir"]), _text(given.get("tag")), models, states):
        path, client_state = load(*args, **options)
    if path is not None:
        session.reset()
        if states:
            load_state(engine, Path(path).parent)
        session.renew_weights()
        session.journal.continue_from(engine.global_steps)
        session.begin(engine.global_steps, loss_scale(engine))
    return path, client_state


def _text(tag: object) -> str | None:
    """Return `tag` as text, since DeepSpeed accepts numbers too; None stays None."""
    return None if tag is None else str(tag)


def load_state(engine: Any, directory: Path) -> None:
    """Restore the compression state from a checkpoint's tag directory, on all ranks or on none. Collective.

    `load_checkpoint` calls this. Call it directly for checkpoints whose other parts are loaded in another way, such as
    universal ones. With `on_missing_state` "reset", a problem on any rank is a CompressWarning, and all residuals and
    momenta start empty.

    Args:
        engine: an engine with compression attached.
        directory: the tag directory of the checkpoint.

    Raises:
        StateError: some rank's state is missing or damaged. Raised on all ranks.
    """
    session: Session = engine.compression
    session.discard_unfinished()
    # In case the checkpoint does not name its run.
    session.journal.adopt(None)
    if _remembers(session):
        load_memories(session, directory, _place(engine), loss_scale(engine))


def load_last(engine: Any) -> None:
    """Load the last checkpoint of this run, but keep the policy's later decisions.

    Without them the run would end up in the same state again. Warns if there is no checkpoint.
    """
    session: Session = engine.compression
    directory, decided = session.last_saved, session.policy.saved()
    if directory is None:
        warnings.warn("nothing to go back to: this run has saved no checkpoint yet", CompressWarning, stacklevel=2)
        return
    engine.load_checkpoint(str(directory.parent), tag=directory.name)
    # The residuals belong to the settings that were in force when it was saved.
    now = session.policy.saved()
    session.policy.load({**decided, **{key: now[key] for key in ("settings", "step", "was_dense")}})
    session.begin(engine.global_steps, loss_scale(engine))


def _remembers(session: Session) -> bool:
    """Return True if there is any compression state to save."""
    return bool(session.stores) or session.policy.observes


def _place(engine: Any) -> Place:
    """Return the place of this rank's files. Each island has its own directory, and numbers its ranks separately."""
    island = _island(engine)
    rank = engine.global_rank if island is None else island.index(engine.global_rank)
    return Place(rank, find_position(engine, engine.compression.config, island), engine.device)


def _island(engine: Any) -> tuple[int, ...] | None:
    """Return the global ranks of this rank's island within the job; None without islands."""
    return engine.mpu.ranks if isinstance(engine.mpu, IslandUnit) else None


def _save_state(engine: Any, place: Place, directory: Path) -> None:
    session: Session = engine.compression
    if session.saving is None and not engine.global_rank:
        # The lists describe files that were written in the background and are now replaced.
        unlist_all(directory)
    if _remembers(session):
        stage = int(engine.zero_optimization_stage())
        write = state.write if session.saving is None else partial(_write_later, session.saving)
        save_memories(session, directory, place, stage, engine.global_steps, loss_scale(engine), write)


def _write_later(saving: Saving, contents: state.Contents, file: Path) -> None:
    saving.add(Call(state.write, (contents, file, saving.held), (file, file.with_suffix(".json"))))
