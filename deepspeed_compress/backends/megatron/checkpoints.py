"""The state of compression inside Megatron's checkpoints (`megatron.core.dist_checkpointing`).

Megatron's state dicts hold tensors, which may be resharded for another number of ranks, and objects, which may not.
Residuals add up over ranks and are not parts of one tensor. The files of a rank, as `save` writes them, are therefore
stored as such an object, and `load` reads them. Both use a temporary directory.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from torch import Tensor

KEY = "deepspeed_compress"
"""Key in a state dict, and of the objects in the checkpoint, one per rank."""

Files = Mapping[str, Tensor]
"""Bytes (uint8) by path."""


def saved_files(save: Callable[[Path], None]) -> dict[str, Any]:
    """Return the files that `save` writes into a directory, as an entry of a state dict to save."""
    with TemporaryDirectory(prefix=KEY) as name:
        directory = Path(name)
        save(directory)
        files = {
            str(file.relative_to(directory)): torch.from_numpy(np.fromfile(file, np.uint8))
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }
    return {KEY: ShardedObject(KEY, files, (dist.get_world_size(),), (dist.get_rank(),))}


def request_files(checkpoint: Path) -> dict[str, Any]:
    """Return an entry of a state dict to load from `checkpoint`; empty if the checkpoint has none.

    It requests the files that this rank saved or, if the number of ranks differs, those of all ranks.
    """
    found = [one for one in load_sharded_metadata(str(checkpoint)).values() if one.key == KEY]
    if not found:
        return {}
    [size] = found[0].global_shape
    if size == dist.get_world_size():
        return {KEY: [ShardedObject(KEY, None, (size,), (dist.get_rank(),))]}
    # Megatron requires each object to be requested by exactly one rank as replica 0.
    return {KEY: [ShardedObject(KEY, None, (size,), (rank,), replica_id=dist.get_rank()) for rank in range(size)]}


def load_files(loaded: Mapping[str, Any], load: Callable[[Path], None]) -> None:
    """Let `load` read the files in `loaded`, the state dict that Megatron returned for the request."""
    entry: Sequence[Files] = loaded.get(KEY, ())
    with TemporaryDirectory(prefix=KEY) as name:
        for files in entry:
            for path, data in files.items():
                file = Path(name) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                data.numpy().tofile(file)
        load(Path(name))
