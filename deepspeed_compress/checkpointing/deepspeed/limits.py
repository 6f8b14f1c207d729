"""Engines whose checkpoints cannot be written in the background."""

import os
from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from deepspeed_compress.errors import UnsupportedError


def check_saving(engine: Any) -> None:
    """Check that DeepSpeed saves in a way that can be done in the background.

    Raises:
        UnsupportedError: it does not.
    """
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise UnsupportedError(
            f"/deepspeed_compress/checkpointing cannot be combined with {type(engine.checkpoint_engine).__name__} "
            "(allowed: DeepSpeed's default checkpoint engine); remove the key, or checkpoint.writer and nebula"
        )
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("/deepspeed_compress/checkpointing requires Linux (memfd_create); remove the key")
    if engine.use_node_local_storage() or engine.zero_nvme_offload_optimizer():
        raise UnsupportedError(
            "/deepspeed_compress/checkpointing cannot be combined with use_node_local_storage or an optimizer on NVMe, "
            "because their files are not all in one directory (allowed: one directory for all ranks); remove "
            "one of the two keys"
        )
