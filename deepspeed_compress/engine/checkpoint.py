"""Residuals in checkpoints: one safetensors file a rank, beside DeepSpeed's own files.

`client_state` is written by one rank alone, so state that differs between ranks needs files of its own.
"""

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepspeed_compress.engine.session import Session
from deepspeed_compress.errors import CompressWarning, StateError

__all__ = ["attach_checkpoint", "load_state", "save_state", "state_file"]

FORMAT = "1"


def attach_checkpoint(engine: Any, session: Session) -> None:
    """Wrap `save_checkpoint` and `load_checkpoint` of this engine; their signatures stay."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
        result = save(save_dir, tag, *args, **options)
        save_state(
            session, state_file(Path(save_dir) / str(tag or f"global_step{engine.global_steps}"), engine.global_rank)
        )
        # A rank that returns may be killed; by then every rank's file must be complete.
        dist.barrier()
        return result

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
        path, client_state = load(load_dir, tag, *args, **options)
        if path is not None:
            file = state_file(Path(path).parent, engine.global_rank)
            if options.get("load_module_only") or not options.get("load_optimizer_states", True):
                session.reset()
            else:
                load_state(session, file, torch.device(engine.device))
            session.begin(engine.global_steps)
        return path, client_state

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint


def state_file(directory: Path, rank: int) -> Path:
    """The file of global rank `rank` in a checkpoint's tag directory."""
    return directory / f"deepspeed_compress_rank_{rank:05d}.safetensors"


def save_state(session: Session, file: Path) -> None:
    """Write the residuals to `file`, by a temporary name. Nothing is written for a method without state."""
    if not session.residuals:
        return
    tensors = {
        json.dumps([direction, *piece]): residual.contiguous()
        for direction, residuals in session.residuals.items()
        for piece, residual in residuals.items()
    }
    metadata = {"format": FORMAT, "ranks": str(dist.get_world_size()), "method": session.config.gradients.method}
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, file)


def load_state(session: Session, file: Path, device: torch.device) -> None:
    """Restore the residuals from `file`.

    A missing file, or one of another number of ranks or another method, leaves the residuals at zero with a
    CompressWarning; a damaged one is a StateError.
    """
    session.reset()
    if not session.residuals:
        return
    if not file.exists():
        _warn_reset(f"{file} does not exist (the checkpoint was written without compression?)")
        return
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata() or {}
            found = {json.dumps(json.loads(key)): stored.get_tensor(key) for key in stored.offset_keys()}
    except (SafetensorError, ValueError) as error:
        raise StateError(f"{file} is damaged ({error}); remove it to start with residuals of zero") from error
    expected = {"format": FORMAT, "ranks": str(dist.get_world_size()), "method": session.config.gradients.method}
    if metadata != expected:
        _warn_reset(f"{file} was written with {metadata}, this run has {expected}")
        return
    for direction, residuals in session.residuals.items():
        pieces = {tuple(json.loads(key)): tensor for key, tensor in found.items()}
        residuals.load({piece[1:]: tensor for piece, tensor in pieces.items() if piece[0] == direction}, device)


def _warn_reset(reason: str) -> None:
    warnings.warn(f"residuals of error feedback start at zero: {reason}", CompressWarning, stacklevel=4)
