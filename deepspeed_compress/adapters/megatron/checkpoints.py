"""What is remembered, inside of Megatron's own checkpoints (`megatron.core.dist_checkpointing`).

Its state dicts hold tensors that other numbers of ranks may cut anew, and objects that nobody cuts. Memories of ranks
add up, and are no parts of one tensor: so the files of a rank, as `save` writes them, are such an object, and `load`
reads them. In between they are files in a temporary directory.
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

__all__ = ["KEY", "load_files", "request_files", "saved_files"]

KEY = "deepspeed_compress"
"""In a state dict, and of the objects in the checkpoint, one a rank."""

Files = Mapping[str, Tensor]
"""Bytes, uint8, by path."""


def saved_files(save: Callable[[Path], None]) -> dict[str, Any]:
    """What `save` writes into a directory, as an entry of a state dict to be saved."""
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
    """An entry of a state dict to be loaded from `checkpoint`: what this rank saved, or where there were more ranks or
    fewer, what all did. Nothing where the checkpoint has none."""
    found = [one for one in load_sharded_metadata(str(checkpoint)).values() if one.key == KEY]
    if not found:
        return {}
    [size] = found[0].global_shape
    if size == dist.get_world_size():
        return {KEY: [ShardedObject(KEY, None, (size,), (dist.get_rank(),))]}
    # Megatron wants each object to be asked for once by a replica 0.
    return {KEY: [ShardedObject(KEY, None, (size,), (rank,), replica_id=dist.get_rank()) for rank in range(size)]}


def load_files(loaded: Mapping[str, Any], load: Callable[[Path], None]) -> None:
    """Have `load` read what `loaded`, the state dict that Megatron made of the request, has of it."""
    entry: Sequence[Files] = loaded.get(KEY, ())
    with TemporaryDirectory(prefix=KEY) as name:
        for files in entry:
            for path, data in files.items():
                file = Path(name) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                data.numpy().tofile(file)
        load(Path(name))
