"""Residuals in checkpoints: one safetensors file a rank, beside DeepSpeed's own files.

`client_state` is written by one rank alone, so state that differs between ranks needs files of its own.
"""

import functools
import inspect
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
    layout = _layout(engine, session)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        given = inspect.signature(save).bind(*args, **options).arguments
        directory = Path(given["save_dir"]) / str(given.get("tag") or f"global_step{engine.global_steps}")
        save_state(session, state_file(directory, engine.global_rank), layout)
        # DeepSpeed writes "latest" at the end: every rank's state must be complete by then.
        dist.barrier()
        return save(*args, **options)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **options: Any) -> Any:
        given = inspect.signature(load).bind(*args, **options).arguments
        path, client_state = load(*args, **options)
        if path is not None:
            session.reset()
            if given.get("load_optimizer_states", True) and not given.get("load_module_only", False):
                load_state(session, state_file(Path(path).parent, engine.global_rank), layout, engine.device)
            session.begin(engine.global_steps)
        return path, client_state

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint


def _layout(engine: Any, session: Session) -> dict[str, str]:
    """What must be the same when the state is loaded, for its pieces to fit."""
    return {
        "format": FORMAT,
        "method": session.config.gradients.method,
        "world_size": str(dist.get_world_size()),
        "data_parallel_size": str(engine.dp_world_size),
        "zero_stage": str(int(engine.zero_optimization_stage())),
    }


def state_file(directory: Path, rank: int) -> Path:
    """The file of global rank `rank` in a checkpoint's tag directory."""
    return directory / f"deepspeed_compress_rank_{rank:05d}.safetensors"


def save_state(session: Session, file: Path, layout: dict[str, str]) -> None:
    """Write the residuals to `file`, by a temporary name. Nothing is written for a method without state."""
    if not session.residuals:
        return
    tensors = {
        json.dumps([direction, *piece]): residual.contiguous()
        for direction, residuals in session.residuals.items()
        for piece, residual in residuals.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, layout)
    os.replace(temporary, file)


def load_state(session: Session, file: Path, layout: dict[str, str], device: torch.device) -> None:
    """Restore the residuals from `file`, which are zero before.

    A missing file, or one of another layout, leaves them at zero with a CompressWarning; a damaged one is a StateError.
    """
    if not session.residuals:
        return
    if not file.exists():
        _warn_reset(f"{file} does not exist (the checkpoint was written without compression?)")
        return
    metadata, tensors = _read(file)
    if metadata != layout:
        _warn_reset(f"{file} was written with {metadata}, this run has {layout}")
        return
    pieces = {tuple(json.loads(key)): tensor for key, tensor in tensors.items()}
    for direction, residuals in session.residuals.items():
        residuals.load({piece[1:]: tensor for piece, tensor in pieces.items() if piece[0] == direction}, device)


def _read(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(file, "pt") as stored:
            return stored.metadata() or {}, {key: stored.get_tensor(key) for key in stored.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise StateError(f"{file} is damaged ({error}); remove it to start with residuals of zero") from error


def _warn_reset(reason: str) -> None:
    warnings.warn(f"residuals of error feedback start at zero: {reason}", CompressWarning, stacklevel=4)
