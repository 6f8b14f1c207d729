"""Compressed messages of an engine's activations, measured on its own groups when it starts."""

from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.crossover import Crossover, Kind, measure_kinds
from deepspeed_compress.backends.deepspeed.activations.experts import find_expert_layers
from deepspeed_compress.backends.deepspeed.activations.layers import is_row
from deepspeed_compress.config import Activations


def measure_engine(engine: Any, activations: Activations) -> list[Crossover]:
    """Measure every kind that compresses messages of `engine`. Collective; waits for the GPU."""
    groups: dict[Kind, ProcessGroup] = {}
    for layer in filter(is_row, engine.module.modules()):  # a stage may lack split layers
        groups["tensor"] = layer.mp_group
    if activations.pipeline is not None:
        groups["pipeline"] = engine.grid.get_pipe_parallel_group()
    for layer in sorted(find_expert_layers(engine), key=lambda layer: layer.ep_size):
        groups["experts"] = layer.ep_group  # the largest, if there are several
    if activations.sequence is not None:
        groups["sequence"] = engine.seq_parallel_group
    return measure_kinds(activations, groups, _message_dtype(engine), torch.device(engine.device))


def _message_dtype(engine: Any) -> torch.dtype:
    """Return the type of most messages: that of DeepSpeed's autocast if it is on, else that of the parameters."""
    found: torch.dtype = next(engine.module.parameters()).dtype
    if engine.torch_autocast_enabled():
        found = engine.torch_autocast_dtype()
    return found
