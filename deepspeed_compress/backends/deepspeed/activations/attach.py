"""Compression of the activations of an engine, and measurement of their messages on the engine's own groups."""

from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.crossover import Crossover, Kind, measure_kinds
from deepspeed_compress.backends.deepspeed.activations.experts import attach_experts, find_expert_layers
from deepspeed_compress.backends.deepspeed.activations.layers import is_row
from deepspeed_compress.backends.deepspeed.activations.pipeline import attach_pipeline
from deepspeed_compress.backends.deepspeed.activations.sequence import attach_sequence
from deepspeed_compress.backends.deepspeed.activations.tensor import attach_tensor
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import Activations
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def attach_activations(engine: Any, activations: Activations, run: Run, patches: Patches) -> None:
    """Compress what ranks that hold different parts of the model send to each other, as `activations` says."""
    if activations.tensor is not None:
        attach_tensor(engine, activations.tensor, run, patches)
    if activations.pipeline is not None:
        attach_pipeline(engine, activations.pipeline, run, patches)
    if activations.experts is not None:
        attach_experts(engine, activations.experts, run.meter, patches)
    if activations.sequence is not None:
        attach_sequence(engine, activations.sequence, run, patches)


def measure_activations(engine: Any, activations: Activations, session: Session) -> list[Crossover]:
    """Measure compressed messages, and record an event for each kind that costs time on this link.

    Collective; waits for the GPU.
    """
    measured = measure_kinds(
        activations, _groups(engine, activations), _message_dtype(engine), torch.device(engine.device)
    )
    for one in measured:
        if not one.pays:
            session.record(one.event(engine.global_steps))
    return measured


def _groups(engine: Any, activations: Activations) -> dict[Kind, ProcessGroup]:
    """Return the group of every kind of messages that `engine` compresses."""
    groups: dict[Kind, ProcessGroup] = {}
    for layer in filter(is_row, engine.module.modules()):  # a stage may lack split layers
        groups["tensor"] = layer.mp_group
    if activations.pipeline is not None:
        groups["pipeline"] = engine.grid.get_pipe_parallel_group()
    for layer in sorted(find_expert_layers(engine), key=lambda layer: layer.ep_size):
        groups["experts"] = layer.ep_group  # the largest, if there are several
    if activations.sequence is not None:
        groups["sequence"] = engine.seq_parallel_group
    return groups


def _message_dtype(engine: Any) -> torch.dtype:
    """Return the type of most messages: that of DeepSpeed's autocast if it is on, else that of the parameters."""
    found: torch.dtype = next(engine.module.parameters()).dtype
    if engine.torch_autocast_enabled():
        found = engine.torch_autocast_dtype()
    return found
