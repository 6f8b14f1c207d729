"""Compression state in checkpoints: a pair of files a rank (`state`), beside DeepSpeed's own.

`client_state` is written by one rank alone, so state that differs between ranks needs files of its own.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_compress.compression import state
from deepspeed_compress.engine.groups import find_position
from deepspeed_compress.engine.norms import loss_scale
from deepspeed_compress.engine.session import Session
from deepspeed_compress.errors import CompressWarning, StateError

__all__ = ["attach_checkpoint", "load_last", "load_state"]


def attach_checkpoint(engine: Any, session: Session) -> None:
    """Wrap `save_checkpoint` and `load_checkpoint` of this engine; their signatures stay.

    Weights are made exact before saving, so that saved ones are and a resumed run goes on as this one does.
    """
    session.patches.wrap(engine, "save_checkpoint", partial(_save, engine, session))
    session.patches.wrap(engine, "load_checkpoint", partial(_load, engine, session))


def _save(engine: Any, session: Session, save: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(save).bind(*args, **options).arguments
    if not given["save_dir"]:
        # DeepSpeed says what is wrong with it, before anything is written.
        return save(*args, **options)
    tag = given.get("tag")
    directory = Path(given["save_dir"]) / str(f"global_step{engine.global_steps}" if tag is None else tag)
    session.renew_weights()
    # DeepSpeed writes "latest" at the end: every rank's state must be complete by then.
    position = find_position(engine, session.config)
    problems = _on_all_ranks(partial(_save_state, engine, directory, position))
    if problems:
        raise StateError(f"compression state is not saved: {problems}")
    saved = save(*args, **options)
    session.last_saved = directory
    return saved


def _load(engine: Any, session: Session, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(load).bind(*args, **options).arguments
    path, client_state = load(*args, **options)
    if path is not None:
        session.reset()
        if given.get("load_optimizer_states", True) and not given.get("load_module_only", False):
            load_state(engine, Path(path).parent)
        session.renew_weights()
        session.journal.go_on(engine.global_steps)
        session.begin(engine.global_steps, loss_scale(engine))
    return path, client_state


def load_state(engine: Any, directory: Path) -> None:
    """Restore what compression remembers from a checkpoint's tag directory, on all ranks or on none. Collective.

    `load_checkpoint` does it; alone it serves checkpoints whose other parts are loaded in another way, such as
    universal ones. What is wrong on any rank is a StateError on all, or with `on_missing_state` "reset" a
    CompressWarning, and every memory starts empty.
    """
    session: Session = engine.compression
    # Where the checkpoint does not say which run it is of.
    session.journal.adopt(None)
    if not _remembers(session):
        return
    position = find_position(engine, session.config)

    def restore() -> None:
        found = state.sources(directory, engine.global_rank, position)
        _check_owners(found[0][1], session)
        same = state.restore(session.stores, found, position, loss_scale(engine), engine.device)
        session.prune_owned = not same
        session.load_decisions(found[0][1].decisions)

    text = _on_all_ranks(restore)
    if not text:
        return
    session.reset()
    if session.config.on_missing_state == "error":
        raise StateError(
            f'{text}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
            '"error", "reset") to start with empty memories'
        )
    warnings.warn(f"compression starts with empty memories: {text}", CompressWarning, stacklevel=3)


def _check_owners(saved: state.Description, session: Session) -> None:
    """StateError if what owners keep was saved by other owners. Residuals of senders add up whoever has them."""
    owners = saved.section.get("ownership", "contiguous")
    kept = sorted(name for name in state.OWNED & saved.layouts.keys() if saved.layouts[name])
    if kept and owners != session.config.ownership:
        raise StateError(
            f'/deepspeed_compress/ownership: "{session.config.ownership}" cannot go on from a checkpoint of '
            f'"{owners}" whose owners kept {", ".join(kept)} (allowed: the same); write "{owners}"'
        )


def load_last(engine: Any) -> None:
    """Go back to the checkpoint that this run has saved last, but keep what the policy has decided since: it would
    lead to where the run comes from. Without a checkpoint a warning says so."""
    session: Session = engine.compression
    directory, decided = session.last_saved, session.policy.saved()
    if directory is None:
        warnings.warn("nothing to go back to: this run has saved no checkpoint yet", CompressWarning, stacklevel=2)
        return
    engine.load_checkpoint(str(directory.parent), tag=directory.name)
    # What was in force when it was saved is what the memories are of.
    now = session.policy.saved()
    session.policy.load({**decided, **{key: now[key] for key in ("settings", "step", "was_dense")}})
    session.begin(engine.global_steps, loss_scale(engine))


def _remembers(session: Session) -> bool:
    """Whether there is anything to save."""
    return bool(session.stores) or session.policy.observes


def _save_state(engine: Any, directory: Path, position: state.Position) -> None:
    session: Session = engine.compression
    if _remembers(session):
        state.save(
            session.stores,
            state.state_file(directory, engine.global_rank),
            position,
            int(engine.zero_optimization_stage()),
            engine.global_steps,
            loss_scale(engine),
            session.config.model_dump(mode="json"),
            session.decisions(),
        )


def _on_all_ranks(work: Callable[[], None]) -> str:
    """Do `work` and tell what went wrong on any rank, "" for nothing: a rank must not fail while others wait for it."""
    problem = None
    try:
        work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = str(error) if isinstance(error, StateError) else f"rank {dist.get_rank()}: {error!r}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return "; ".join(dict.fromkeys(found for found in problems if found))
