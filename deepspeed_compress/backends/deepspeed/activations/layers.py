"""Layers that AutoTP splits."""

from typing import Any

from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import nn

from deepspeed_compress.backends.deepspeed.versions import column_forwards, row_forwards


def is_column(layer: nn.Module) -> bool:
    """Return True if `layer` is column-parallel: its input is whole, and its output stays split. Heads are excluded."""
    head = getattr(layer, "is_vocab_parallel_lm_head", False) or getattr(layer, "gather_output", False)
    return type(layer).forward in column_forwards() and not head and _is_split(layer)


def is_row(layer: nn.Module) -> bool:
    """Return True if `layer` is row-parallel: its input is split, and its output is summed. Heads are excluded."""
    return type(layer).forward in row_forwards() and _is_split(layer)


def _is_split(layer: Any) -> bool:
    return bool(layer.mp_group is not None and layer.tp_world_size > 1)


def sums_itself(layer: Any) -> bool:
    """Return True if `layer` sums in each call now. Hooks of another engine may have taken this call over already."""
    elsewhere = getattr(layer, "defer_collectives_to_compiler", False) or TensorParallel_Layer.tp_overlap_comm
    return layer.mp_group is not None and not elsewhere
